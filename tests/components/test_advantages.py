"""Advantage estimators: hand-checked numbers, and loops in plain python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.components.common import checked, close, double, groups, tables
from trl_variants import Variant, VariantError, resolve, use
from trl_variants.components.advantages import gae, group_mean, leave_one_out, returns, reward_to_go
from trl_variants.registry import load_registry
from trl_variants.testing import make_rollout

REGISTRY = load_registry("none")


def estimate(name: str, rollout: object, **parameters: object) -> Tensor:
    """The estimator in a recipe that holds nothing else."""
    critic = "separate" if name == "gae" else None
    bare = {"advantage_normalizer": None, "kl": None, "critic": critic}
    variant = Variant(name="x", extends="grpo", advantage_estimator=use(name, **parameters), **bare)
    return resolve(variant, registry=REGISTRY).advantages(rollout).advantages


def one_group(function: object, rewards: list[float], scored: list[bool] | None = None) -> Tensor:
    n = len(rewards)
    rows = torch.ones(n, dtype=torch.bool) if scored is None else torch.tensor(scored)
    return function(double(rewards), rows, torch.zeros(n, dtype=torch.long))


def test_returns_subtracts_a_constant() -> None:
    close(returns(double([1.0, 0.0]), torch.tensor([True, True]), baseline=0.25), [0.75, -0.25])
    close(returns(double([1.0, 0.0]), torch.tensor([True, False]), baseline=0.25), [0.75, 0.0])
    close(estimate("returns", make_rollout([1.0, 0.0]), baseline=0.25), [0.75, -0.25])


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        # mean 1/2
        ("group_mean", [1.0, 1.0, 0.0, 0.0], [0.5, 0.5, -0.5, -0.5]),
        # mean 1/4; the others' mean is 0 for the first and 1/3 for the rest
        ("group_mean", [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ("leave_one_out", [1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # 3 ones of 8 (pains B09): 1 - 3/8, 0 - 3/8; and times 8/7: 5/7, -3/7
        ("group_mean", [1.0] * 3 + [0.0] * 5, [0.625] * 3 + [-0.375] * 5),
        ("leave_one_out", [1.0] * 3 + [0.0] * 5, [5 / 7] * 3 + [-3 / 7] * 5),
    ],
)
def test_group_estimators_give_the_hand_checked_numbers(name: str, rewards: list[float], expected: list[float]) -> None:
    close(one_group({"group_mean": group_mean, "leave_one_out": leave_one_out}[name], rewards), expected)
    close(estimate(name, make_rollout(rewards)), expected)


@pytest.mark.parametrize("function", [group_mean, leave_one_out])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.7, 0.1, 1 / 3, -1e4 - 0.1])
def test_a_constant_group_is_exactly_zero(function: object, dtype: torch.dtype, constant: float) -> None:
    rewards = torch.full((8,), constant, dtype=dtype)
    ids = torch.zeros(8, dtype=torch.long)
    assert function(rewards, torch.ones(8).bool(), ids).tolist() == [0.0] * 8


def test_trl_keeps_the_rounding_error_of_a_constant_group() -> None:
    # 0.7 eight times in float32: the mean is one unit in the last place off, 5.96e-8.
    rewards, ids = torch.full((8,), 0.7), torch.zeros(8, dtype=torch.long)
    left = group_mean(rewards, torch.ones(8).bool(), ids, zero_constant=False)
    close(left, [2**-24] * 8)


def test_unscored_completions_leave_the_baseline_and_get_zero() -> None:  # pains B04
    # [1, -, 0, 0]: mean of three 1/3; of the others 0 and 1/2
    rewards, scored = [1.0, math.nan, 0.0, 0.0], [True, False, True, True]
    for name, expected in (
        ("group_mean", [2 / 3, 0.0, -1 / 3, -1 / 3]),
        ("leave_one_out", [1.0, 0.0, -0.5, -0.5]),
        ("returns", [1.0, 0.0, 0.0, 0.0]),
    ):
        close(estimate(name, make_rollout(rewards, scored=scored)), expected)
    close(one_group(group_mean, rewards, scored), [2 / 3, 0.0, -1 / 3, -1 / 3])
    close(one_group(leave_one_out, rewards, scored), [1.0, 0.0, -0.5, -0.5])


@pytest.mark.parametrize("name", ["group_mean", "leave_one_out"])
def test_a_group_with_one_scored_completion_gets_zero_and_spoils_nothing(name: str) -> None:  # pains B03
    rewards = [1.0, math.nan, math.nan, math.nan, 1.0, 0.0]
    rollout = make_rollout(rewards, scored=[True, False, False, False, True, True], group_ids=[0, 0, 0, 0, 1, 1])
    half = 1.0 if name == "leave_one_out" else 0.5
    close(estimate(name, rollout), [0.0, 0.0, 0.0, 0.0, half, -half])


def test_uneven_groups_are_told_apart_by_their_ids() -> None:  # pains B16
    ids = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    rewards = [1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 3.0, 1.0, 1.0, 3.0]
    expected = double([0.5, -0.5, -0.5, 0.5, 0.0, 0.0, 0.0, 1.0, -1.0, -1.0, 1.0])
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    shuffled = make_rollout(double(rewards)[order], group_ids=torch.tensor(ids)[order])
    close(estimate("group_mean", make_rollout(rewards, group_ids=ids)), expected)
    close(estimate("group_mean", shuffled), expected[order])


@checked
@given(groups())
def test_group_estimators_equal_a_loop(data: tuple) -> None:
    rewards, scored, ids = data
    means, others = [], []
    for r, s, g in zip(rewards, scored, ids, strict=True):
        mine = [q for q, t, h in zip(rewards, scored, ids, strict=True) if t and h == g]
        usable = s and len(mine) >= 2 and max(mine) - min(mine) > 1e-6
        means.append(r - sum(mine) / len(mine) if usable else 0.0)
        others.append(r - (sum(mine) - r) / (len(mine) - 1) if usable else 0.0)
    arguments = (double(rewards), torch.tensor(scored), torch.tensor(ids))
    close(group_mean(*arguments), means)
    close(leave_one_out(*arguments), others)


# -- per token --------------------------------------------------------------------------------------------------------


def test_gae_gives_the_numbers_of_document_001() -> None:
    # delta = [.2-.1, .3-.2, 1-.3] = [.1, .1, .7]; A_3 = .7, A_2 = .1 + .95 * .7 = .765, A_1 = .1 + .95 * .765 = .82675
    rewards, values = double([[0.0, 0.0, 1.0]]), double([[0.1, 0.2, 0.3]])
    result = gae(rewards, values, torch.ones(1, 3))
    close(result.advantages, [[0.82675, 0.765, 0.7]])
    close(result.returns, [[0.92675, 0.965, 1.0]])
    close(gae(rewards, values, torch.ones(1, 3), lam=0.0).advantages, [[0.1, 0.1, 0.7]])  # the TD errors
    close(gae(rewards, values, torch.ones(1, 3), lam=1.0).advantages, [[0.9, 0.8, 0.7]])  # return - V
    rollout = make_rollout([1.0], values=[[0.1, 0.2, 0.3]], lengths=[3])
    close(estimate("gae", rollout), [[0.82675, 0.765, 0.7]])
    close(estimate("gae", rollout, lam=0.0), [[0.1, 0.1, 0.7]])
    close(estimate("gae", rollout, lam=1.0), [[0.9, 0.8, 0.7]])


def test_a_masked_span_passes_the_carry_on_and_never_bootstraps() -> None:
    # mask 1, 0, 1; V = .5, 9, .5; r = 1 at the end: delta = [.5 - .5, 1 - .5]; A = [.95 * .5, ., .5]
    rewards, values, mask = double([[0.0, 0.0, 1.0]]), double([[0.5, 9.0, 0.5]]), torch.tensor([[1, 0, 1]])
    result = gae(rewards, values, mask)
    close(result.advantages, [[0.475, 0.0, 0.5]])
    close(result.returns, [[0.975, 0.0, 1.0]])
    close(estimate("gae", make_rollout([1.0], values=values, mask=mask)), [[0.475, 0.0, 0.5]])


def test_a_cut_completion_bootstraps_only_when_asked_to() -> None:  # pains E07
    # V = 1, 2 and V_next = 5: deltas 2 - 1 and 5 - 2 with, 2 - 1 and 0 - 2 without; lam 1/2
    rollout = make_rollout(
        [0.0, 0.0],
        values=[[1.0, 2.0], [1.0, 2.0]],
        lengths=[2, 2],
        truncated=torch.tensor([True, False]),
        final_values=[5.0, 5.0],
    )
    close(estimate("gae", rollout, lam=0.5), [[0.0, -2.0], [0.0, -2.0]])
    close(estimate("gae", rollout, lam=0.5, bootstrap_truncated=True), [[2.5, 3.0], [0.0, -2.0]])


def test_bootstrapping_without_a_final_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="bootstrap_truncated needs truncated and final_values"):
        gae(double([[0.0]]), double([[0.0]]), torch.ones(1, 1), bootstrap_truncated=True)


@checked
@given(
    tables("rewards", "values"),
    st.sampled_from([1.0, 0.9, 0.0]),
    st.sampled_from([1.0, 0.95, 0.5, 0.0]),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_gae_equals_the_sum_of_td_errors(table: dict, gamma: float, lam: float, cut: list[bool]) -> None:
    rows = len(table["mask"])
    final = [1.5 * (i + 1) for i in range(rows)]
    advantages, targets = [], []
    for mask, r, v, last in zip(table["mask"], table["rewards"], table["values"], range(rows), strict=True):
        policy = [t for t, m in enumerate(mask) if m]
        after = [*(v[t] for t in policy[1:]), final[last] if cut[last] else 0.0][: len(policy)]
        delta = [r[t] + gamma * w - v[t] for t, w in zip(policy, after, strict=True)]
        a = [sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:])) for i in range(len(policy))]
        advantages.append([a[policy.index(t)] if m else 0.0 for t, m in enumerate(mask)])
        targets.append([a[policy.index(t)] + v[t] if m else 0.0 for t, m in enumerate(mask)])
    result = gae(
        double(table["rewards"]),
        double(table["values"]),
        torch.tensor(table["mask"]),
        torch.tensor(cut[:rows]),
        double(final),
        gamma=gamma,
        lam=lam,
        bootstrap_truncated=True,
    )
    close(result.advantages, advantages)
    close(result.returns, targets)


def test_the_targets_may_have_a_lambda_of_their_own() -> None:  # pains E15
    # Advantages with lambda 1/2 as above; targets with lambda 1 are the whole return, 1 for every token.
    rewards, values = double([[0.0, 0.0, 1.0]]), double([[0.1, 0.2, 0.3]])
    result = gae(rewards, values, torch.ones(1, 3), lam=0.5, lam_returns=1.0)
    close(result.advantages, [[0.1 + 0.5 * (0.1 + 0.5 * 0.7), 0.1 + 0.5 * 0.7, 0.7]])
    close(result.returns, [[1.0, 1.0, 1.0]])
    close(gae(rewards, values, torch.ones(1, 3), lam=1.0, lam_returns=0.0).returns, [[0.2, 0.3, 1.0]])  # r + V_next
    with pytest.raises(VariantError, match="gamma, lam and lam_returns must be between 0 and 1"):
        estimate("gae", make_rollout([1.0], values=[[0.1]], lengths=[1]), lam_returns=1.5)


@checked
@given(tables("rewards", "values"), st.sampled_from([1.0, 0.95, 0.0]), st.sampled_from([1.0, 0.5]))
def test_a_lambda_of_the_targets_is_a_second_run(table: dict, lam: float, lam_returns: float) -> None:
    inputs = double(table["rewards"]), double(table["values"]), torch.tensor(table["mask"])
    both = gae(*inputs, gamma=0.9, lam=lam, lam_returns=lam_returns)
    close(both.advantages, gae(*inputs, gamma=0.9, lam=lam).advantages)
    close(both.returns, gae(*inputs, gamma=0.9, lam=lam_returns).returns)


@checked
@given(tables("rewards", "values"), st.sampled_from([float("nan"), float("inf"), -1e30]))
def test_what_stands_at_a_masked_place_changes_no_advantage(table: dict, junk: float) -> None:
    mask = torch.tensor(table["mask"])
    rewards, values = double(table["rewards"]), double(table["values"])
    clean = gae(rewards, values, mask, lam=0.5)
    spoilt = gae(rewards.masked_fill(~mask, junk), values.masked_fill(~mask, junk), mask, lam=0.5)
    assert torch.equal(clean.advantages, spoilt.advantages) and torch.equal(clean.returns, spoilt.returns)


def test_reward_to_go_costs_no_decay_over_a_masked_span() -> None:
    # gamma 1/2, tokens 0 and 2 count: A_2 = 4, A_0 = 1 + 4/2
    close(reward_to_go(double([[1.0, 9.0, 4.0]]), torch.tensor([[1, 0, 1]]), gamma=0.5), [[3.0, 0.0, 4.0]])
    rollout = make_rollout([4.0], mask=[[1, 0, 1]])
    close(estimate("reward_to_go", rollout, gamma=0.5), [[2.0, 0.0, 4.0]])


@checked
@given(tables("rewards"), st.sampled_from([1.0, 0.9, 0.5, 0.0]))
def test_reward_to_go_equals_a_loop(table: dict, gamma: float) -> None:
    expected = []
    for mask, r in zip(table["mask"], table["rewards"], strict=True):
        policy = [t for t, m in enumerate(mask) if m]
        sums = {t: sum(gamma**k * r[s] for k, s in enumerate(policy[i:])) for i, t in enumerate(policy)}
        expected.append([sums.get(t, 0.0) for t in range(len(mask))])
    close(reward_to_go(double(table["rewards"]), torch.tensor(table["mask"]), gamma=gamma), expected)
