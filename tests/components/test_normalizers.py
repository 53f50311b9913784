"""Advantage normalizers: hand-checked numbers, loops, and what constant groups do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.components.common import checked, close, double, groups, numbers, tables
from trl_variants import VariantError, resolve
from trl_variants.components.normalizers import batch_std, group_std
from trl_variants.registry import load_registry
from trl_variants.testing import make_rollout

REGISTRY = load_registry("none")


def advantages(variant: str, rollout: object, **overrides: object) -> Tensor:
    return resolve(variant, {"kl": None, **overrides}, REGISTRY).advantages(rollout).advantages


def bare_group_std(rewards: list[float], **parameters: object) -> Tensor:
    """`group_std` of one group's centred rewards."""
    r = double(rewards)
    ids = torch.zeros(len(r), dtype=torch.long)
    return group_std(r - r.mean(), r, torch.ones(len(r)).bool(), ids, **{"eps": 0.0, **parameters})


@pytest.mark.parametrize(
    ("rewards", "parameters", "expected"),
    [
        # std 1/2, population (000)
        ([1.0, 1.0, 0.0, 0.0], {}, [1.0, 1.0, -1.0, -1.0]),
        # std sqrt(1/3), sample: .5 sqrt(3)
        ([1.0, 1.0, 0.0, 0.0], {"correction": 1}, [math.sqrt(3) / 2] * 2 + [-math.sqrt(3) / 2] * 2),
        # mean 1/4, std sqrt(3)/4, population (004): sqrt(3), -1/sqrt(3)
        ([1.0, 0.0, 0.0, 0.0], {}, [math.sqrt(3)] + [-1 / math.sqrt(3)] * 3),
        # std 1/2, sample
        ([1.0, 0.0, 0.0, 0.0], {"correction": 1}, [1.5, -0.5, -0.5, -0.5]),
        # TRL adds 1e-4, verl 1e-6, to the sample's: .75 / .5001 = 1.49970, .75 / .500001 = 1.499997
        ([1.0, 0.0, 0.0, 0.0], {"correction": 1, "eps": 1e-4}, [0.75 / 0.5001] + [-0.25 / 0.5001] * 3),
        ([1.0, 0.0, 0.0, 0.0], {"correction": 1, "eps": 1e-6}, [0.75 / 0.500001] + [-0.25 / 0.500001] * 3),
        # 3 ones of 8 (pains B09), sample std sqrt(15/56): .625 / .51755 = 1.2076
        (
            [1.0] * 3 + [0.0] * 5,
            {"correction": 1},
            [0.625 / math.sqrt(15 / 56)] * 3 + [-0.375 / math.sqrt(15 / 56)] * 5,
        ),
        ([0.3] * 4, {}, [0.0] * 4),
    ],
)
def test_grpo_gives_the_hand_checked_numbers(rewards: list[float], parameters: dict, expected: list[float]) -> None:
    close(bare_group_std(rewards, **parameters), expected)
    close(advantages("grpo", make_rollout(rewards), advantage_normalizer={"eps": 0.0, **parameters}), expected)


def test_unscored_completions_are_in_no_deviation() -> None:  # pains B04, with the sample's deviation
    # [1, -, 0, 0]: mean 1/3, sample std sqrt(1/3): 2/sqrt(3) = 1.1547, -1/sqrt(3) = -.5774
    rollout = make_rollout([1.0, math.nan, 0.0, 0.0], scored=[True, False, True, True])
    expected = [2 / math.sqrt(3), 0.0, -1 / math.sqrt(3), -1 / math.sqrt(3)]
    close(advantages("grpo", rollout, advantage_normalizer={"correction": 1, "eps": 0}), expected)


def test_one_scored_completion_gives_zero_whatever_the_correction() -> None:  # pains B03
    rollout = make_rollout([1.0, math.nan, 1.0, 0.0], scored=[True, False, True, True], group_ids=[0, 0, 1, 1])
    got = advantages("grpo", rollout, advantage_normalizer={"correction": 1, "eps": 0})
    close(got, [0.0, 0.0, math.sqrt(0.5), -math.sqrt(0.5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-4])
def test_a_constant_group_is_exactly_zero_whatever_eps_is(dtype: torch.dtype, eps: float) -> None:
    rollout = make_rollout(torch.full((8,), 0.7, dtype=dtype))
    assert advantages("grpo", rollout, advantage_normalizer={"eps": eps}).tolist() == [0.0] * 8
    rewards, ids = torch.full((8,), 0.7, dtype=dtype), torch.zeros(8, dtype=torch.long)
    off = torch.full((8,), 1e-8, dtype=dtype)
    assert group_std(off, rewards, torch.ones(8).bool(), ids, eps=eps).tolist() == [0.0] * 8


def test_trls_own_numbers_stay_available_rounding_error_and_all() -> None:
    # 0.7 eight times in float32: 5.96e-8 / (6.4e-8 + 1e-4) = 5.957e-4
    got = advantages("trl_grpo", make_rollout(torch.full((8,), 0.7)))
    close(got, [5.9567e-4] * 8, atol=1e-7)


def test_advantages_per_token_are_scaled_by_their_own_groups_deviation() -> None:
    per_token = double([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    rewards, ids = double([0.0, 2.0, 0.0, 20.0]), torch.tensor([0, 0, 1, 1])  # deviations 1 and 10
    got = group_std(per_token, rewards, torch.ones(4).bool(), ids, eps=0.0)
    close(got, [[1.0, 2.0], [3.0, 4.0], [0.5, 0.6], [0.7, 0.8]])


@checked
@given(groups(), st.sampled_from([0, 1]), st.sampled_from([0.0, 0.25]))
def test_group_std_equals_a_loop(data: tuple, correction: int, eps: float) -> None:
    rewards, scored, ids = data
    given_advantages = [i + 1.0 for i in range(len(rewards))]
    expected = []
    for a, s, g in zip(given_advantages, scored, ids, strict=True):
        mine = [q for q, t, h in zip(rewards, scored, ids, strict=True) if t and h == g]
        if not s or len(mine) < 2 or max(mine) - min(mine) <= 1e-6:
            expected.append(0.0)
            continue
        mean = sum(mine) / len(mine)
        std = math.sqrt(sum((q - mean) ** 2 for q in mine) / (len(mine) - correction))
        expected.append(a / (std + eps))
    got = group_std(
        double(given_advantages),
        double(rewards),
        torch.tensor(scored),
        torch.tensor(ids),
        correction=correction,
        eps=eps,
    )
    close(got, expected)


def test_leave_one_out_with_group_std_stays_bounded() -> None:  # pains B07
    for rewards in ([1.0, 0.0, 0.0, 0.0], [0.0] + [0.95] * 7):
        got = advantages("rloo", make_rollout(rewards), advantage_normalizer="group_std")
        assert got.abs().max() < 10


# -- over the batch ---------------------------------------------------------------------------------------------------


def test_batch_std_by_completion_and_by_token() -> None:
    rows, mask = torch.tensor([True, True]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    # completions: mean 2, std 1. tokens: 1, 3, 3, 3: mean 2.5, std sqrt(3)/2: -sqrt(3), 1/sqrt(3)
    close(batch_std(double([1.0, 3.0]), mask, rows, level="completion", eps=0.0), [-1.0, 1.0])
    third = 1 / math.sqrt(3)
    close(batch_std(double([1.0, 3.0]), mask, rows, eps=0.0), [[-math.sqrt(3), 0.0, 0.0], [third, third, third]])
    # uncentred: the values over the same deviation
    close(batch_std(double([1.0, 3.0]), mask, rows, level="completion", center=False, eps=0.0), [1.0, 3.0])
    # sample: std sqrt(2)
    half = math.sqrt(0.5)
    close(batch_std(double([1.0, 3.0]), mask, rows, level="completion", correction=1, eps=0.0), [-half, half])


def test_batch_std_by_completion_refuses_advantages_per_token() -> None:
    with pytest.raises(ValueError, match="level 'completion' needs one advantage per completion; these are per token"):
        batch_std(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1), level="completion")
    with pytest.raises(VariantError, match="advantage_normalizer 'batch_std' .* needs one advantage per completion"):
        resolve("reinforce_pp", {"advantage_normalizer": {"level": "completion"}}, REGISTRY)


def test_reinforce_pp_compares_across_prompts_and_its_baseline_within() -> None:  # pains B10
    rollout = make_rollout([1.0, 1.0, 0.0, 0.0], group_size=2)
    close(advantages("reinforce_pp", rollout, advantage_normalizer={"eps": 0}), [[1.0], [1.0], [-1.0], [-1.0]])
    close(advantages("reinforce_pp_baseline", rollout), [[0.0]] * 4)


def test_batch_scaling_has_one_scale_and_group_scaling_one_per_group() -> None:  # pains B13
    rollout = make_rollout([0.0, 2.0, 0.0, 20.0], group_size=2)  # deviations 1 and 10
    batch = {"name": "batch_std", "level": "completion", "center": False, "eps": 0}
    # centred: -1, 1, -10, 10; their deviation over the batch sqrt(202/4)
    scale = math.sqrt(202 / 4)
    close(advantages("grpo", rollout, advantage_normalizer=batch), [-1 / scale, 1 / scale, -10 / scale, 10 / scale])
    close(advantages("grpo", rollout, advantage_normalizer={"eps": 0}), [-1.0, 1.0, -1.0, 1.0])


def test_a_constant_batch_is_zero_when_centred_and_left_alone_otherwise() -> None:
    rows, mask = torch.ones(8).bool(), torch.ones(8, 1)
    constant = torch.full((8,), 0.7)
    assert batch_std(constant, mask, rows).tolist() == [[0.0]] * 8
    assert batch_std(constant, mask, rows, center=False).tolist() == constant[:, None].tolist()


def test_rows_that_a_filter_drops_are_in_no_batch_statistic() -> None:
    # the first group is constant and dropped: only 1 and 3 are left, mean 2, std 1
    rollout = make_rollout([7.0, 7.0, 1.0, 3.0], group_size=2)
    settings = {"name": "batch_std", "level": "completion", "eps": 0}
    got = advantages(
        "grpo",
        rollout,
        sample_filter="zero_variance",
        advantage_estimator="returns",
        advantage_normalizer=settings,
    )
    close(got, [0.0, 0.0, -1.0, 1.0])


@checked
@given(
    tables(),
    st.data(),
    st.sampled_from(["token", "completion", "per token"]),
    st.booleans(),
    st.sampled_from([0, 1]),
)
def test_batch_std_equals_a_loop(table: dict, data: st.DataObject, kind: str, center: bool, correction: int) -> None:
    mask = table["mask"]
    rows, width = len(mask), len(mask[0])
    scored = data.draw(st.lists(st.sampled_from([True, True, False]), min_size=rows, max_size=rows))
    keep = data.draw(st.lists(st.sampled_from([True, True, False]), min_size=rows, max_size=rows))
    values = data.draw(st.lists(numbers, min_size=rows * width, max_size=rows * width))
    table_of = [values[i * width : (i + 1) * width] for i in range(rows)]
    if kind != "per token":
        table_of = [[row[0]] * width for row in table_of]
    used = [s and k for s, k in zip(scored, keep, strict=True)]
    if kind == "completion":
        counted = [(i, 0) for i in range(rows) if used[i]]
    else:
        counted = [(i, t) for i in range(rows) for t in range(width) if used[i] and mask[i][t]]
    seen = [table_of[i][t] for i, t in counted]
    out = [[0.0] * width for _ in range(rows)]
    if seen:
        mean = sum(seen) / len(seen)
        constant = max(seen) - min(seen) <= 1e-6 * max(1, *(abs(v) for v in seen))
        std = math.sqrt(sum((v - mean) ** 2 for v in seen) / max(len(seen) - correction, 1))
        for i, t in counted:
            v = table_of[i][t]
            if constant:
                out[i][t] = 0.0 if center else v
            else:
                out[i][t] = (v - mean if center else v) / (std + 1e-8)
    per_row = double([row[0] for row in table_of])
    got = batch_std(
        double(table_of) if kind == "per token" else per_row,
        torch.tensor(mask),
        torch.tensor(scored),
        torch.tensor(keep),
        level="completion" if kind == "completion" else "token",
        center=center,
        correction=correction,
    )
    close(got, [row[0] for row in out] if kind == "completion" else out)
