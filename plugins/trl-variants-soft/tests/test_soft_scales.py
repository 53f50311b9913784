"""The estimator and the normalizer: advantages by hand, and against loops."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trl_variants_soft.gdpo import gdpo
from trl_variants_soft.lite_ppo import batch_reward_std

from tests.components.common import checked, close, double, groups, numbers
from trl_variants import KL, VariantError, load_registry, resolve
from trl_variants.testing import make_rollout

REGISTRY = load_registry("none", extra=["trl_variants_soft"])
NAN = math.nan
A, B = math.sqrt(3 / 2), math.sqrt(1 / 2)


def advantages(variant: str, rollout: Any, **overrides: Any) -> Tensor:
    return resolve(variant, overrides, REGISTRY).advantages(rollout).advantages


def several(per_func: list[list[float]], weights: list[float], **given: Any) -> Any:
    """A rollout with several reward functions, whose rewards are their weighted sum."""
    table = double(per_func)
    scored = ~table.isnan().all(1)
    return make_rollout(
        (table * double(weights)).nansum(1),
        rewards_per_func=table,
        reward_weights=double(weights),
        reward_names=tuple(f"r{k}" for k in range(len(weights))),
        scored=scored,
        **given,
    )


# -- gdpo ----------------------------------------------------------------------------------------------------------


def of_gdpo(per_func: list[list[float]], weights: list[float], ids: Any = None, **parameters: Any) -> Tensor:
    table = double(per_func)
    ids = torch.zeros(len(table), dtype=torch.long) if ids is None else torch.tensor(ids)
    return gdpo(table, double(weights), ~table.isnan().all(1), ids, **{"eps": 0.0, **parameters})


@pytest.mark.parametrize(
    ("per_func", "parameters", "expected"),
    [
        # first: mean 1/2, std 1/2 -> +-1; second: mean 20, std 10 -> -+1; weights 1 and 1/2
        ([[1, 10], [0, 10], [1, 30], [0, 30]], {}, [0.5, -1.5, 1.5, -0.5]),
        # sample's: std sqrt(1/3) and sqrt(400/3): +-sqrt(3)/2 each
        (
            [[1, 10], [0, 10], [1, 30], [0, 30]],
            {"correction": 1},
            [x * math.sqrt(3) / 2 for x in (0.5, -1.5, 1.5, -0.5)],
        ),
        # eps 1/2: the first is halved, the second is 10 / 10.5
        (
            [[1, 10], [0, 10], [1, 30], [0, 30]],
            {"eps": 0.5},
            [0.5 - 5 / 10.5, -0.5 - 5 / 10.5, 0.5 + 5 / 10.5, -0.5 + 5 / 10.5],
        ),
        # the second scored two rows only: mean 20, std 10 of those, and nothing for the others
        ([[1, NAN], [0, 10], [1, NAN], [0, 30]], {}, [1.0, -1.5, 1.0, -0.5]),
        # one of it is no group
        ([[1, NAN], [0, 10], [1, NAN], [0, NAN]], {}, [1.0, -1.0, 1.0, -1.0]),
        # no reward at all: in no statistic, and 0. First: mean 1/2, std sqrt(1/6) -> +-A, 0; second: mean 20, std
        # sqrt(200) -> -B, -B, 2 B
        ([[1, 10], [0, 10], [NAN, NAN], [0.5, 40]], {}, [A - B / 2, -A - B / 2, 0.0, B]),
        # 0.7 is not exact in binary: the rounding error of its mean is no signal
        ([[1, 0.7], [0, 0.7], [1, 0.7], [0, 0.7]], {}, [1.0, -1.0, 1.0, -1.0]),
    ],
)
def test_gdpo(per_func: list[list[float]], parameters: dict[str, Any], expected: list[float]) -> None:
    close(of_gdpo(per_func, [1.0, 0.5], **parameters), expected)


def test_the_batch_is_normalized_after_the_sum() -> None:
    # [.5, -1.5, 1.5, -.5]: mean 0, variance (2 * .25 + 2 * 2.25) / 4 = 1.25
    rollout = several([[1, 10], [0, 10], [1, 30], [0, 30]], [1.0, 0.5])
    exact = {"advantage_estimator": {"eps": 0.0}, "advantage_normalizer": {"eps": 0.0}}
    close(advantages("gdpo", rollout, **exact), double([0.5, -1.5, 1.5, -0.5]) / math.sqrt(1.25))


def test_mixtures_of_rewards_that_grpo_cannot_tell_apart() -> None:
    # Two prompts, two completions each: (1, 0) against (0, 0), and (1, 1) against (0, 0). GRPO normalizes the sums 1, 0
    # and 2, 0 to 1, -1 both. GDPO: 1, -1 and 2, -2; over the batch of variance 10/4.
    rollout = several([[1, 0], [0, 0], [1, 1], [0, 0]], [1.0, 1.0], group_size=2)
    exact = {"advantage_normalizer": {"eps": 0.0}}
    close(advantages("grpo", rollout, kl=None, **exact), [1.0, -1.0, 1.0, -1.0])
    got = advantages("gdpo", rollout, advantage_estimator={"eps": 0.0}, **exact)
    close(got, double([1.0, -1.0, 2.0, -2.0]) / math.sqrt(2.5))


def test_the_scale_of_a_reward_function_does_not_matter() -> None:
    rows = [[0.1, 3.0], [0.4, 1.0], [0.2, 2.0], [0.9, 5.0]]
    close(of_gdpo(rows, [0.7, 0.3]), of_gdpo([[a, 1000 * b + 7] for a, b in rows], [0.7, 0.3]), atol=1e-10)


@checked
@given(one=groups(), data=st.data(), correction=st.sampled_from([0, 1]), eps=st.sampled_from([1e-6, 0.5]))
def test_gdpo_against_a_loop(
    one: tuple[list[float], list[bool], list[int]], data: Any, correction: int, eps: float
) -> None:
    first, scored, ids = one
    second = data.draw(st.lists(st.one_of(numbers, st.just(NAN)), min_size=len(ids), max_size=len(ids)))
    columns, weights = ([r if s else NAN for r, s in zip(first, scored, strict=True)], second), (0.75, 2.0)
    want = [0.0] * len(ids)
    for column, weight in zip(columns, weights, strict=True):
        for group in set(ids):
            rows = [i for i, name in enumerate(ids) if name == group and not math.isnan(column[i])]
            values = [column[i] for i in rows]
            if len(set(values)) < 2:  # multiples of 1/8: equal or not, nothing between
                continue
            std = statistics.stdev(values) if correction else statistics.pstdev(values)
            for i in rows:
                want[i] += weight * (column[i] - statistics.fmean(values)) / (std + eps)
    rows = [list(row) for row in zip(*columns, strict=True)]
    close(of_gdpo(rows, list(weights), ids, correction=correction, eps=eps), want, atol=1e-9)


def test_without_the_rule_for_constant_groups_rounding_is_blown_up_as_in_trl() -> None:
    # Eight times 0.7 in float32: each is 2^-24 above the mean as rounded, and over 1e-4 that is 6e-4.
    seven = torch.full((8, 1), 0.7)
    given = (seven, torch.ones(1), torch.ones(8).bool(), torch.zeros(8).long())
    assert gdpo(*given, eps=1e-4).tolist() == [0.0] * 8
    assert gdpo(*given, eps=1e-4, zero_constant=False).tolist() == pytest.approx([5.96e-4] * 8, abs=1e-6)


@pytest.mark.parametrize(
    "change", [{"reward_shaper": "soft_overlong"}, {"kl": KL("k1", placement="sequence_reward", coef=0.1)}]
)
def test_gdpo_refuses_what_it_would_not_see(change: dict[str, Any]) -> None:
    with pytest.raises(VariantError, match="has no effect: advantage_estimator 'gdpo' reads neither rewards nor"):
        resolve("gdpo", change, REGISTRY)


# -- batch_reward_std ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "std"),
    [
        ({}, math.sqrt(5)),  # 0, 2, 4, 6: mean 3, squares 9 + 1 + 1 + 9 = 20
        ({"correction": 1}, math.sqrt(20 / 3)),
        ({"eps": 0.5}, math.sqrt(5) + 0.5),
        ({"correction": 1, "eps": 1e-4}, math.sqrt(20 / 3) + 1e-4),  # TRL
    ],
)
def test_lite_ppo_divides_by_the_std_of_all_rewards(parameters: dict[str, Any], std: float) -> None:
    # Two groups, each centred to -1 and 1: batch_std of these would divide by 1.
    got = advantages(
        "lite_ppo", make_rollout([0.0, 2.0, 4.0, 6.0], group_size=2), advantage_normalizer={"eps": 0.0, **parameters}
    )
    close(got, [-1 / std, 1 / std, -1 / std, 1 / std])


def test_the_scale_is_of_the_rows_that_are_scored_and_kept() -> None:
    # 0 and 4 are left: mean 2, std 2
    rewards, row = double([0.0, 100.0, 4.0, 50.0]), torch.tensor
    for tokens in (1, 3):
        given = torch.ones(4, tokens, dtype=torch.float64) if tokens > 1 else double([1.0] * 4)
        got = batch_reward_std(given, rewards, row([True, False, True, True]), row([True, True, True, False]), eps=0.0)
        close(got, given * (double([0.5, 0.0, 0.5, 0.0])[:, None] if tokens > 1 else double([0.5, 0.0, 0.5, 0.0])))


def test_a_constant_batch_is_no_signal_and_one_of_constant_groups_neither() -> None:
    assert advantages("lite_ppo", make_rollout([0.7] * 8, group_size=4)).tolist() == [0.0] * 8
    assert advantages("lite_ppo", make_rollout([0.7] * 4 + [0.1] * 4, group_size=4)).tolist() == [0.0] * 8
    rows = torch.ones(2).bool()
    close(batch_reward_std(double([1.0, 1.0]), double([0.7, 0.7]), rows, eps=0.5), [0.0, 0.0])
    close(batch_reward_std(double([1.0, 1.0]), double([0.7, 0.7]), rows, eps=0.5, zero_constant=False), [2.0, 2.0])


@pytest.mark.parametrize(
    ("variant", "override", "expected"),
    [
        ("gdpo", {"advantage_estimator": {"correction": 2}}, "correction must be 0 (population) or 1 (sample)"),
        ("gdpo", {"advantage_estimator": {"eps": -1}}, "eps must not be negative"),
        ("lite_ppo", {"advantage_normalizer": {"correction": -1}}, "correction must be 0 (population) or 1 (sample)"),
        ("lite_ppo", {"advantage_normalizer": {"eps": -1}}, "eps must not be negative"),
    ],
)
def test_parameters_that_are_refused(variant: str, override: dict[str, Any], expected: str) -> None:
    with pytest.raises(VariantError) as error:
        resolve(variant, override, REGISTRY)
    assert str(error.value).endswith(f": {expected}.")
