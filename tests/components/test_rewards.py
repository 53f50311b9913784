"""Reward shapers: what is added to the reward, and what whitening counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.components.common import checked, close, double, numbers, tables
from trl_variants import VariantError, resolve
from trl_variants.components.rewards import (
    clip_rewards,
    missing_eos_penalty,
    soft_overlong,
    whiten_rewards,
    whiten_token_rewards,
)
from trl_variants.registry import load_registry
from trl_variants.testing import make_rollout

REGISTRY = load_registry("none")


def shaped(shaper: object, rollout: object, **overrides: object) -> Tensor:
    """The rewards that the estimator sees."""
    recipe = resolve("grpo", {"kl": None, "reward_shaper": shaper, **overrides}, REGISTRY)
    return recipe.advantages(rollout).rewards


@pytest.mark.parametrize(
    ("lengths", "max_length", "cache", "expected"),
    [
        # L 20, c 4: 0 up to 16, then -1/4 a token
        ([1, 16, 17, 18, 20, 25], 20, 4, [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]),
        ([4, 6, 8], 8, 4, [0.0, -0.5, -1.0]),  # pains B26
        ([16, 17, 18, 20], 20, None, [0.0, -0.25, -0.5, -1.0]),  # L / 5 = 4 by default
        # L / 5 = 2.4 tokens: (9.6 - 10) / 2.4
        ([9, 10, 12], 12, None, [0.0, -1 / 6, -1.0]),
        ([18, 19], 20, 3, [-1 / 3, -2 / 3]),
        ([0, 5], 5, 5, [0.0, -1.0]),
    ],
)
def test_soft_overlong(lengths: list[int], max_length: int, cache: int | None, expected: list[float]) -> None:
    close(soft_overlong(torch.tensor(lengths), max_length, cache=cache), expected)
    rollout = make_rollout([0.0] * len(lengths), mask=torch.ones(len(lengths), 2), max_length=max_length,
                           lengths=lengths)  # fmt: skip
    close(shaped({"name": "soft_overlong", "cache": cache}, rollout), expected)


def test_soft_overlong_refuses_a_slope_wider_than_the_limit() -> None:
    with pytest.raises(ValueError, match=r"^cache \(9\) must not be larger than the length limit \(8\)$"):
        soft_overlong(torch.tensor([1]), 8, cache=9)
    with pytest.raises(VariantError, match="^reward_shaper 'soft_overlong': cache must be above 0.$"):
        shaped({"name": "soft_overlong", "cache": 0}, make_rollout([0.0]))


def test_soft_overlong_takes_a_wide_slope_of_a_long_limit() -> None:
    shaped({"name": "soft_overlong", "cache": 16384}, make_rollout([0.0, 1.0], max_length=32768))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_term_has_the_rewards_own_precision(dtype: torch.dtype) -> None:
    has_eos = torch.tensor([False, True])
    rollout = make_rollout(torch.zeros(2, dtype=dtype), has_eos=has_eos, max_length=20, lengths=[19, 1])
    for shaper, expected in (
        ({"name": "missing_eos_penalty", "penalty": 0.1}, -0.1),
        ({"name": "soft_overlong", "cache": 3}, -2 / 3),
    ):
        rewards = shaped(shaper, rollout)
        assert rewards.dtype == dtype
        assert rewards[0] == torch.tensor(expected, dtype=dtype)


def test_a_missing_stop_token_subtracts() -> None:  # pains E08
    close(missing_eos_penalty(torch.tensor([True, False]), penalty=0.5), [0.0, -0.5])
    rollout = make_rollout([1.0, 1.0], has_eos=torch.tensor([True, False]))
    close(shaped({"name": "missing_eos_penalty", "penalty": 0.5}, rollout), [1.0, 0.5])
    with pytest.raises(VariantError, match="penalty must not be negative; it is subtracted.$"):
        shaped({"name": "missing_eos_penalty", "penalty": -1}, rollout)


def test_clip_rewards() -> None:
    close(clip_rewards(double([-20.0, 3.0, 11.0])), [-10.0, 3.0, 10.0])
    close(shaped({"name": "clip_rewards", "low": 0, "high": 1}, make_rollout([-2.0, 0.5, 3.0])), [0.0, 0.5, 1.0])
    with pytest.raises(VariantError, match=r"low \(2.0\) must be below high \(1.0\)"):
        shaped({"name": "clip_rewards", "low": 2, "high": 1}, make_rollout([0.0, 1.0]))


def test_shapers_run_in_the_order_in_which_they_are_listed() -> None:
    rollout = make_rollout([1.0, 0.0], has_eos=torch.tensor([False, True]))
    penalty, clip = {"name": "missing_eos_penalty", "penalty": 0.5}, {"name": "clip_rewards", "low": 0.75, "high": 2}
    close(shaped([penalty, clip], rollout), [0.75, 0.75])
    close(shaped([clip, penalty], rollout), [0.5, 0.75])


def test_whitening_gives_unit_variance_and_keeps_the_mean_when_asked() -> None:
    rewards = double([1.0, 3.0])  # mean 2, std 1
    rows = torch.tensor([True, True])
    close(whiten_rewards(rewards, rows, eps=0.0), [-1.0, 1.0])
    close(whiten_rewards(rewards, rows, keep_mean=True, eps=0.0), [1.0, 3.0])
    close(whiten_rewards(rewards, rows, correction=1, eps=0.0), [-math.sqrt(0.5), math.sqrt(0.5)])
    close(shaped({"name": "whiten_rewards", "eps": 0}, make_rollout([1.0, 3.0])), [-1.0, 1.0])


@checked
@given(st.lists(st.tuples(numbers, st.booleans(), st.booleans()), min_size=1, max_size=8), st.booleans())
def test_whitening_counts_the_rows_that_are_scored_and_kept(rows: list[tuple], keep_mean: bool) -> None:
    rewards, scored, keep = (list(column) for column in zip(*rows, strict=True))
    seen = [r for r, s, k in rows if s and k]
    mean = sum(seen) / len(seen) if seen else 0.0
    std = math.sqrt(sum((r - mean) ** 2 for r in seen) / len(seen)) if seen else 0.0
    expected = [((r - mean) / (std + 0.5) + (mean if keep_mean else 0.0)) if s else 0.0 for r, s, _ in rows]
    got = whiten_rewards(double(rewards), torch.tensor(scored), torch.tensor(keep), keep_mean=keep_mean, eps=0.5)
    close(got, expected)


def test_rows_that_a_filter_drops_are_in_no_whitening() -> None:
    # the constant group is dropped: 1 and 3 have mean 2 and deviation 1
    rollout = make_rollout([0.0, 0.0, 1.0, 3.0], group_size=2)
    got = shaped({"name": "whiten_rewards", "eps": 0}, rollout, sample_filter="zero_variance")
    close(got, [-2.0, -2.0, -1.0, 1.0])
    after = {"name": "whiten_token_rewards", "correction": 0, "keep_mean": False, "eps": 0}
    close(shaped(after, rollout, sample_filter="zero_variance"), [0.0, 0.0, -1.0, 1.0])


@checked
@given(tables("rewards"), st.booleans(), st.sampled_from([0, 1]), st.data())
def test_whitening_token_rewards_equals_a_loop(table: dict, keep_mean: bool, correction: int, data) -> None:
    mask, rewards = table["mask"], table["rewards"]
    scored = data.draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask)))
    at = [(i, t) for i, row in enumerate(mask) for t, m in enumerate(row) if m and scored[i]]
    seen = [rewards[i][t] for i, t in at]
    mean = sum(seen) / len(seen) if seen else 0.0
    std = math.sqrt(sum((r - mean) ** 2 for r in seen) / max(len(seen) - correction, 1))
    expected = [[r if m else 0.0 for r, m in zip(*rows, strict=True)] for rows in zip(rewards, mask, strict=True)]
    for i, t in at:
        expected[i][t] = (rewards[i][t] - mean) / (std + 0.5) + (mean if keep_mean else 0.0)
    got = whiten_token_rewards(
        double(rewards),
        torch.tensor(mask),
        torch.tensor(scored),
        keep_mean=keep_mean,
        correction=correction,
        eps=0.5,
    )
    close(got, expected)


def test_whitening_token_rewards_sees_kl_and_whitening_rewards_does_not() -> None:
    # r = 1 and 3 at the end of one token each; k1 = 1 and 0, beta 1: token rewards 0 and 3
    rollout = make_rollout([1.0, 3.0], lengths=[1, 1], log_probs=[[1.0], [0.0]], ref_log_probs=[[0.0], [0.0]])
    kl = {"estimator": "k1", "placement": "token_reward", "coef": 1.0}
    before = shaped({"name": "whiten_rewards", "eps": 0}, rollout, kl=kl)
    close(before, [-1.0 - 1.0, 1.0])  # whitened, then KL
    after = {"name": "whiten_token_rewards", "eps": 0, "keep_mean": False, "correction": 0}
    close(shaped(after, rollout, kl=kl), [-1.0, 1.0])  # KL, then whitened
