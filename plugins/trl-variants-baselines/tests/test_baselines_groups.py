"""Baselines from the group: hand-checked numbers, loops in plain python, and what each estimates in expectation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from baselines_common import checked, close, double, groups, mates, one_group, recipe
from hypothesis import given
from hypothesis import strategies as st
from trl_variants_baselines import (
    gpg,
    grpo_passk,
    leave_one_out_std,
    maxrl,
    opo,
    pass_at_k,
)

from trl_variants import VariantError
from trl_variants.testing import make_rollout

ONE_OF_FOUR = [1.0, 0.0, 0.0, 0.0]


def advantages(variant: str, rewards: list[float], **fields: Any) -> torch.Tensor:
    overrides = fields.pop("overrides", {})
    return recipe(variant, **overrides).advantages(make_rollout(rewards, **fields)).advantages


# -- opo -----------------------------------------------------------------------------------------------------------


def test_opo_weighs_rewards_by_length() -> None:
    # (3*1 + 1*0 + 1*0 + 1*0) / 6 = 1/2
    close(advantages("opo", ONE_OF_FOUR, lengths=[3, 1, 1, 1]), [0.5, -0.5, -0.5, -0.5])
    # (3*1 + 1*0) / 4 = 3/4
    close(advantages("opo", [1.0, 0.0], lengths=[3, 1]), [0.25, -0.75])
    # equal lengths: the plain mean, 1/4
    close(advantages("opo", ONE_OF_FOUR, lengths=[2, 2, 2, 2]), [0.75, -0.25, -0.25, -0.25])


def test_opo_counts_policy_tokens_only() -> None:
    # lengths 1 and 2: the first completion's other tokens are a tool's. (1*1 + 2*0) / 3
    mask = [[1, 0, 0], [1, 1, 0]]
    close(advantages("opo", [1.0, 0.0], mask=mask), [2 / 3, -1 / 3])
    close(advantages("opo", [1.0, 0.0], mask=[[0, 0], [0, 0]]), [0.0, 0.0])


@checked
@given(groups(), st.data())
def test_opo_equals_a_loop(case: tuple[list[float], list[bool], list[int]], data: Any) -> None:
    rewards, scored, ids = case
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=len(rewards), max_size=len(rewards)))
    expected = []
    for i, r in enumerate(rewards):
        group = mates(ids, scored, i)
        varied = scored[i] and len({rewards[j] for j in group}) > 1
        b = sum(lengths[j] * rewards[j] for j in group) / sum(lengths[j] for j in group) if varied else r
        expected.append(r - b)
    mask = torch.arange(5)[None] < torch.tensor(lengths)[:, None]
    close(opo(double(rewards), torch.tensor(scored), torch.tensor(ids), mask), expected)


# -- gpg -----------------------------------------------------------------------------------------------------------


def test_gpg_rescales_by_the_completions_that_count() -> None:
    # mean 1/2; 2 of 4 rows are in a group that differs: alpha 2. 1 of 4 rewards is not 0: alpha 4.
    close(advantages("gpg", [1.0, 0.0, 0.0, 0.0], group_size=2), [1.0, -1.0, 0.0, 0.0])
    nonzero = {"overrides": {"advantage_estimator": {"counted": "nonzero"}}}
    close(advantages("gpg", [1.0, 0.0, 0.0, 0.0], group_size=2, **nonzero), [2.0, -2.0, 0.0, 0.0])
    # all right counts as all wrong does, but for verl: 3 rewards are not 0, alpha 4/3
    close(advantages("gpg", [1.0, 0.0, 1.0, 1.0], group_size=2), [1.0, -1.0, 0.0, 0.0])
    close(advantages("gpg", [1.0, 0.0, 1.0, 1.0], group_size=2, **nonzero), [2 / 3, -2 / 3, 0.0, 0.0])
    # an unscored row is in no count: B 3, 2 of them in a group that differs
    scored = [True, True, True, False]
    close(advantages("gpg", [1.0, 0.0, 0.0, 0.0], group_size=2, scored=scored), [0.75, -0.75, 0.0, 0.0])
    close(advantages("gpg", [0.7] * 8, group_size=4), [0.0] * 8)


def test_gpg_counts_only_what_the_filters_keep() -> None:
    kept = {"overrides": {"sample_filter": "zero_variance"}}
    close(advantages("gpg", [1.0, 0.0, 0.0, 0.0], group_size=2, **kept), [0.5, -0.5, 0.0, 0.0])


@checked
@given(groups(), st.sampled_from(["varied", "nonzero"]), st.data())
def test_gpg_equals_a_loop(case: tuple[list[float], list[bool], list[int]], counted: str, data: Any) -> None:
    rewards, scored, ids = case
    n = len(rewards)
    keep = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    varied = [scored[i] and len({rewards[j] for j in mates(ids, scored, i)}) > 1 for i in range(n)]
    batch = [i for i in range(n) if scored[i] and keep[i]]
    informative = [i for i in batch if (varied[i] if counted == "varied" else rewards[i] != 0)]
    alpha = len(batch) / max(len(informative), 1)
    expected = []
    for i in range(n):
        group = mates(ids, scored, i)
        expected.append(alpha * (rewards[i] - sum(rewards[j] for j in group) / len(group)) if varied[i] else 0.0)
    arguments = (double(rewards), torch.tensor(scored), torch.tensor(ids), torch.tensor(keep))
    close(gpg(*arguments, counted=counted), expected)


# -- maxrl ---------------------------------------------------------------------------------------------------------


def test_maxrl_divides_by_the_mean() -> None:
    # mean 1/4: (3/4) / (1/4) = 3, (-1/4) / (1/4) = -1
    close(advantages("maxrl", ONE_OF_FOUR), [3.0, -1.0, -1.0, -1.0])
    # with eps 1/4: (3/4) / (1/2), (-1/4) / (1/2)
    eps = {"overrides": {"advantage_estimator": {"eps": 0.25}}}
    close(advantages("maxrl", ONE_OF_FOUR, **eps), [1.5, -0.5, -0.5, -0.5])
    close(advantages("maxrl", [0.0] * 4), [0.0] * 4)
    close(advantages("maxrl", [0.7] * 8), [0.0] * 8)


@pytest.mark.parametrize("rewards", [[-1.0, 0.0, 0.0, 0.0], [1.0, -1.0], [0.1, 0.2, -0.3], [0.3, -0.1, -0.2]])
def test_maxrl_is_0_where_the_mean_is_not_above_0(rewards: list[float]) -> None:
    close(one_group(maxrl, rewards), [0.0] * len(rewards))
    close(one_group(maxrl, [r * 1e6 for r in rewards], eps=1e-6), [0.0] * len(rewards))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_maxrl_climbs_the_first_terms_of_the_log_likelihood(size: int) -> None:
    """Over all outcomes: the expected gradient in p is that of Σ_{k<G} pass@k / k, so Σ_{k<G-1} (1-p)^k."""
    p, expected = 0.3, 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        probability = math.prod(p if r else 1 - p for r in outcome)
        score = double([1 / p if r else -1 / (1 - p) for r in outcome])
        expected += probability * float((one_group(maxrl, list(outcome)) * score).mean())
    assert expected == pytest.approx(sum((1 - p) ** k for k in range(size - 1)), abs=1e-12)


@checked
@given(groups(st.integers(0, 16).map(lambda n: n / 8)), st.sampled_from([0.0, 1e-6]))
def test_maxrl_equals_a_loop(case: tuple[list[float], list[bool], list[int]], eps: float) -> None:
    rewards, scored, ids = case
    expected = []
    for i, r in enumerate(rewards):
        group = mates(ids, scored, i)
        mean = sum(rewards[j] for j in group) / max(len(group), 1)
        expected.append((r - mean) / (mean + eps) if scored[i] and len({rewards[j] for j in group}) > 1 else 0.0)
    close(maxrl(double(rewards), torch.tensor(scored), torch.tensor(ids), eps=eps), expected)


# -- pass@k --------------------------------------------------------------------------------------------------------


def test_pass_at_k_gives_the_hand_checked_numbers() -> None:
    # n 4, c 1, k 2: R = 1 - C(3,2)/C(4,2) = 1/2, sigma 1/2. Right: (1/2)/(1/2). Wrong: (1/2 - C(2,1)/C(3,1)) / (1/2).
    close(one_group(pass_at_k, ONE_OF_FOUR, k=2), [1.0, -1 / 3, -1 / 3, -1 / 3])
    # c 2: R = 1 - C(2,2)/C(4,2) = 5/6, sigma = sqrt(5)/6. Right: (1/6) / sigma. Wrong: (1/6 - C(1,1)/C(3,1)) / sigma.
    close(one_group(pass_at_k, [1.0, 1.0, 0.0, 0.0], k=2), [5**-0.5, 5**-0.5, -(5**-0.5), -(5**-0.5)])
    # c 3: every pair holds a right one
    close(one_group(pass_at_k, [1.0, 1.0, 1.0, 0.0], k=2), [0.0] * 4)
    # with eps 1/2: sigma + eps = 1
    close(one_group(pass_at_k, ONE_OF_FOUR, k=2, eps=0.5), [0.5, -1 / 6, -1 / 6, -1 / 6])
    close(one_group(pass_at_k, [0.2, 0.1, 0.1, 0.1], k=2, threshold=0.15), [1.0, -1 / 3, -1 / 3, -1 / 3])
    close(one_group(pass_at_k, [1.0, -1.0, -1.0, -1.0], k=2), [1.0, -1 / 3, -1 / 3, -1 / 3])


def test_pass_at_1_is_grpo_with_rewards_of_0_and_1() -> None:
    # mean 1/4, population standard deviation sqrt(3)/4
    close(one_group(pass_at_k, ONE_OF_FOUR, k=1), [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)])
    grpo = {"advantage_normalizer": {"eps": 0.0}}
    for rewards in ([1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]):
        close(one_group(pass_at_k, rewards, k=1), advantages("grpo", rewards, overrides=grpo))


@checked
@given(groups(st.sampled_from([0.0, 1.0])), st.integers(1, 4))
def test_pass_at_k_is_the_mean_over_every_set_of_k(case: tuple[list[float], list[bool], list[int]], k: int) -> None:
    rewards, scored, ids = case
    expected = []
    for i in range(len(rewards)):
        group = mates(ids, scored, i)
        sets = list(itertools.combinations(group, k))
        best = [max(rewards[j] for j in chosen) for chosen in sets]
        mean = sum(best) / max(len(best), 1)
        std = math.sqrt(sum((b - mean) ** 2 for b in best) / max(len(best), 1))
        mine = [b for b, chosen in zip(best, sets, strict=True) if i in chosen]
        expected.append((sum(mine) / len(mine) - mean) / std if scored[i] and mine and std else 0.0)
    close(pass_at_k(double(rewards), torch.tensor(scored), torch.tensor(ids), k=k), expected, atol=1e-9)


def test_pass_at_k_needs_k_completions() -> None:
    assert recipe("pass_at_k").min_generations == 4
    eight = recipe("pass_at_k", advantage_estimator={"k": 8})
    with pytest.raises(VariantError) as error:
        eight.check_generations(7)
    assert str(error.value) == (
        "advantage_estimator 'pass_at_k' needs at least 8 generations per prompt; num_generations is 7."
    )
    # 3 of 4 are scored: no set of 4
    scored = [True, True, True, False]
    close(advantages("pass_at_k", ONE_OF_FOUR, scored=scored), [0.0] * 4)


def test_grpo_passk_rewards_the_lead_of_the_best() -> None:
    close(one_group(grpo_passk, [0.25, 1.0, 0.5]), [0.0, 0.5, 0.0])
    close(one_group(grpo_passk, [1.0, 1.0, 0.5]), [0.0, 0.0, 0.0])
    close(one_group(grpo_passk, [-1.0, -3.0]), [2.0, 0.0])
    close(one_group(grpo_passk, [0.5]), [0.0])
    # sample std of 1,0,0,0: sqrt(((3/4)^2 + 3 (1/4)^2) / 3) = 1/2; verl's (r1 - r2) / (std + eps)
    close(advantages("grpo_passk", ONE_OF_FOUR), [1 / (0.5 + 1e-6), 0.0, 0.0, 0.0])


@checked
@given(groups())
def test_grpo_passk_is_the_best_of_all_minus_the_best_of_the_others(
    case: tuple[list[float], list[bool], list[int]],
) -> None:
    rewards, scored, ids = case
    expected = []
    for i in range(len(rewards)):
        group = mates(ids, scored, i)
        others = [rewards[j] for j in group if j != i]
        expected.append(max(rewards[j] for j in group) - max(others) if scored[i] and others else 0.0)
    close(grpo_passk(double(rewards), torch.tensor(scored), torch.tensor(ids)), expected)


# -- leave-one-out scaling -----------------------------------------------------------------------------------------


def test_loo_grpo_gives_the_numbers_of_nemo() -> None:
    # The others of the first are equal: 1 - 0, unscaled. Of another: [1, 0, 0], mean 1/3, sample std sqrt(1/3).
    other = -(1 / 3) / ((1 / 3) ** 0.5 + 1e-6)
    close(advantages("loo_grpo", ONE_OF_FOUR), [1.0, other, other, other])
    assert other == pytest.approx(-0.577349, abs=1e-6)
    # population: sqrt(2)/3
    population = {"overrides": {"advantage_normalizer": {"correction": 0, "eps": 0.0}}}
    close(advantages("loo_grpo", ONE_OF_FOUR, **population), [1.0, *[-(2**-0.5)] * 3])
    close(advantages("loo_grpo", [0.7] * 8), [0.0] * 8)
    assert recipe("loo_grpo").min_generations == 3


@checked
@given(groups(), st.sampled_from([0, 1]))
def test_leave_one_out_std_equals_a_loop(case: tuple[list[float], list[bool], list[int]], correction: int) -> None:
    rewards, scored, ids = case
    expected = []
    for i in range(len(rewards)):
        others = [rewards[j] for j in mates(ids, scored, i) if j != i]
        mean = sum(others) / max(len(others), 1)
        squares = sum((r - mean) ** 2 for r in others)
        std = math.sqrt(squares / (len(others) - correction)) if len(others) > 1 else 0.0
        expected.append((1.0 / (std + 1e-6) if std else 1.0) * (i + 1) if scored[i] else 0.0)
    given_advantages = torch.arange(1, len(rewards) + 1, dtype=torch.float64)
    statistics = (double(rewards), torch.tensor(scored), torch.tensor(ids))
    close(leave_one_out_std(given_advantages, *statistics, correction=correction), expected, atol=1e-9)
    per_token = leave_one_out_std(given_advantages[:, None].expand(-1, 3), *statistics, correction=correction)
    close(per_token, double(expected)[:, None].expand(-1, 3), atol=1e-9)
