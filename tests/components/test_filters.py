"""Sample filters: which groups carry signal, and what dropping them changes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from tests.components.common import checked, close, double, groups
from trl_variants import VariantError, __version__, resolve
from trl_variants.components import filters
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch, make_rollout

REGISTRY = load_registry("none")


def keep(sample_filter: object, rollout: object) -> list[bool]:
    return resolve("dr_grpo", {"sample_filter": sample_filter}, REGISTRY).advantages(rollout).keep.tolist()


def bare(name: str, rewards: list[float], ids: list[int], **parameters: object) -> list[bool]:
    r = double(rewards)
    arguments = (r, r[:, None], ("accuracy",), torch.ones(len(r)).bool(), torch.tensor(ids))
    return getattr(filters, name)(*arguments, **parameters).tolist()


def test_zero_variance_keeps_the_groups_whose_rewards_differ() -> None:  # pains B22: spread, not mean
    rewards, ids = [0.5, 0.5, 0.5, 0.5, 0.0, 1.0, 0.0, 1.0], [0] * 4 + [1] * 4
    assert bare("zero_variance", rewards, ids) == [False] * 4 + [True] * 4
    assert keep("zero_variance", make_rollout(rewards, group_ids=ids)) == [False] * 4 + [True] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_not_taken_for_signal(dtype: torch.dtype) -> None:
    # 0.1 + 0.2 and 0.3 differ in the last place; peers' `std != 0` keeps eight times 0.7 in float32
    for rewards in (torch.full((8,), 0.7, dtype=dtype), torch.tensor([0.1 + 0.2, 0.3], dtype=dtype)):
        assert keep("zero_variance", make_rollout(rewards)) == [False] * len(rewards)


def test_mean_band_keeps_what_is_strictly_inside() -> None:
    rewards, ids = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2]
    assert bare("mean_band", rewards, ids) == [False, False, True, True, False, False]
    assert bare("mean_band", rewards, ids, low=0.5, high=2.0) == [True, True, False, False, False, False]
    assert keep("mean_band", make_rollout(rewards, group_ids=ids)) == [False, False, True, True, False, False]


def test_truncated_drops_what_the_length_limit_cut() -> None:
    assert filters.truncated(torch.tensor([True, False])).tolist() == [False, True]
    rollout = make_rollout([0.0, 1.0, 2.0], truncated=torch.tensor([False, True, False]))
    assert keep("truncated", rollout) == [True, False, True]


def test_all_filters_must_agree() -> None:
    rollout = make_rollout([0.5, 0.5, 0.0, 1.0], group_size=2, truncated=torch.tensor([False, False, True, False]))
    assert keep(["zero_variance", "truncated"], rollout) == [False, False, False, True]


def test_a_filter_may_look_at_one_reward_function() -> None:
    # the total differs in both groups, accuracy only in the second
    accuracy, style = [1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]
    rollout = make_rollout(
        double(accuracy) + double(style),
        group_size=2,
        rewards_per_func=torch.stack([double(accuracy), double(style)], dim=1),
        reward_weights=double([1.0, 1.0]),
        reward_names=("accuracy", "style"),
    )
    assert keep("zero_variance", rollout) == [True] * 4
    assert keep({"name": "zero_variance", "reward": "accuracy"}, rollout) == [False, False, True, True]
    assert keep({"name": "mean_band", "reward": "accuracy"}, rollout) == [False, False, True, True]
    assert keep({"name": "mean_band", "reward": "style"}, rollout) == [True] * 4
    with pytest.raises(VariantError) as error:
        keep({"name": "zero_variance", "reward": "acuracy"}, rollout)
    assert str(error.value) == (
        f"sample_filter 'zero_variance' (trl-variants {__version__}) failed: there is no reward function named "
        "'acuracy'; there are: accuracy, style"
    )


def test_a_reward_function_that_returned_nothing_is_in_no_groups_spread_or_mean() -> None:
    # accuracy gave None to the first of each group, style scored every row
    accuracy, style = double([math.nan, 1.0, 1.0, math.nan, 0.0, 1.0]), torch.ones(6).double()
    rollout = make_rollout(
        style,
        group_size=3,
        rewards_per_func=torch.stack([accuracy, style], dim=1),
        reward_weights=double([1.0, 1.0]),
        reward_names=("accuracy", "style"),
    )
    assert keep({"name": "zero_variance", "reward": "accuracy"}, rollout) == [False] * 3 + [True] * 3
    assert keep({"name": "mean_band", "reward": "accuracy"}, rollout) == [False] * 3 + [True] * 3


@checked
@given(groups())
def test_filters_equal_a_loop(data: tuple) -> None:
    rewards, scored, ids = data
    expected, inside = [], []
    for group in ids:
        mine = [r for r, s, g in zip(rewards, scored, ids, strict=True) if s and g == group]
        expected.append(bool(mine) and max(mine) != min(mine))
        inside.append(bool(mine) and -1.0 < sum(mine) / len(mine) < 1.0)
    unscored = [r if s else math.nan for r, s in zip(rewards, scored, strict=True)]
    rollout = make_rollout(unscored, group_ids=ids, scored=scored)
    assert keep("zero_variance", rollout) == expected
    assert keep({"name": "mean_band", "low": -1, "high": 1}, rollout) == inside


def test_filters_see_raw_rewards_and_group_statistics_see_full_groups() -> None:
    # the penalty makes the first group differ; the filter looks before it
    rollout = make_rollout([1.0, 1.0, 0.0, 1.0], group_size=2, has_eos=torch.tensor([True, False, True, True]))
    recipe = resolve(
        "dr_grpo", {"sample_filter": ["zero_variance", "truncated"], "reward_shaper": "missing_eos_penalty"}, REGISTRY
    )
    result = recipe.advantages(rollout)
    assert result.keep.tolist() == [False, False, True, True]
    close(result.advantages, [0.5, -0.5, -0.5, 0.5])


def test_dropping_degenerate_groups_leaves_the_gradient_of_the_others_alone() -> None:  # pains B15
    rollout = make_rollout([1.0, 1.0, 0.0, 1.0], group_size=2, lengths=[2, 1, 2, 3])
    ref, log_probs = double([[-1.5] * 3] * 4), double([[-1.0] * 3] * 4)
    kl = {"kl": {"coef": 0.1}}

    def gradient(overrides: dict, rows: list[int]) -> torch.Tensor:
        recipe = resolve("grpo", {**kl, **overrides}, REGISTRY)
        result = recipe.advantages(rollout)
        leaf = log_probs[rows].clone().requires_grad_()
        mask = (rollout.mask & result.keep[:, None])[rows]
        batch = make_batch(advantages=result.advantages[rows], log_probs=leaf, ref_log_probs=ref[rows], mask=mask)
        recipe.loss(batch).loss.backward()
        return leaf.grad

    every = [0, 1, 2, 3]
    filtered = gradient({"sample_filter": "zero_variance"}, every)
    close(filtered[2:], gradient({}, [2, 3]))
    close(filtered[:2], torch.zeros(2, 3).double())
    assert (gradient({}, every)[:2] != 0).any()  # canonical: KL acts on the constant group


def test_bounds_of_a_band_are_checked() -> None:
    with pytest.raises(VariantError, match=r"^sample_filter 'mean_band': low \(1.0\) must be below high \(1.0\).$"):
        keep({"name": "mean_band", "low": 1}, make_rollout([0.0, 1.0]))
