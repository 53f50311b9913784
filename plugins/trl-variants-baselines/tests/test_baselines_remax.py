"""ReMax: the greedy baseline, alone, with KL per token, and discounted."""

from __future__ import annotations

from typing import Any

import torch
from baselines_common import checked, close, double, numbers, recipe
from hypothesis import given
from hypothesis import strategies as st
from trl_variants_baselines import remax

from trl_variants.testing import make_rollout

NO_KL = {"kl": None}


def test_the_greedy_reward_is_subtracted_from_every_token() -> None:
    rollout = make_rollout([1.0, 0.0], group_size=1, lengths=[2, 1], greedy_rewards=[0.25, 0.5])
    close(recipe("remax", **NO_KL).advantages(rollout).advantages, [[0.75, 0.75], [-0.5, 0.0]])


def test_kl_is_taken_from_each_token_on() -> None:
    # k1 = log pi - log ref = .5 on each token, beta .05: rewards -.025, -.025 + 1. From the first on: .95 - .25.
    rollout = make_rollout(
        [1.0], log_probs=[[-1.0, -1.0]], ref_log_probs=[[-1.5, -1.5]], lengths=[2], greedy_rewards=[0.25]
    )
    close(recipe("remax").advantages(rollout).advantages, [[0.7, 0.725]])


def test_the_discount_is_on_reward_and_baseline_alike() -> None:
    # (1 - 1/4) on the last token, half of it on the one before; the token between is a tool's
    mask = torch.tensor([[True, False, True]])
    rewards = double([[0.0, 9.0, 1.0]])
    close(remax(rewards, double([0.25]), mask[:, 0], mask, gamma=0.5), [[0.375, 0.0, 0.75]])


def test_rows_without_any_reward_get_0_whatever_their_baseline() -> None:
    rollout = make_rollout([1.0, 0.0], lengths=[2, 2], scored=[True, False], greedy_rewards=[0.5, float("nan")])
    close(recipe("remax", **NO_KL).advantages(rollout).advantages, [[0.5, 0.5], [0.0, 0.0]])


def test_remax_needs_no_group_and_takes_one_update() -> None:
    whole = recipe("remax")
    assert (whole.min_generations, whole.variant.max_updates_per_rollout) == (1, 1)
    assert whole.needs("greedy_rewards")


@checked
@given(
    st.lists(st.tuples(st.lists(st.booleans(), min_size=4, max_size=4), numbers, numbers), min_size=1, max_size=4),
    st.sampled_from([1.0, 0.5]),
)
def test_remax_equals_a_loop(rows: list[tuple[list[bool], float, float]], gamma: float) -> None:
    masks = [mask for mask, *_ in rows]
    token_rewards = [[(reward + t) / 4 if on else 7.0 for t, on in enumerate(mask)] for mask, reward, _ in rows]
    expected: list[list[Any]] = []
    for mask, given_rewards, (_, _, baseline) in zip(masks, token_rewards, rows, strict=True):
        tokens = [t for t, on in enumerate(mask) if on]
        line = [0.0] * 4
        for place, t in enumerate(tokens):
            later = tokens[place:]
            line[t] = (
                sum(gamma**i * given_rewards[s] for i, s in enumerate(later)) - gamma ** (len(later) - 1) * baseline
            )
        expected.append(line)
    baselines = double([baseline for *_, baseline in rows])
    scored = torch.ones(len(rows), dtype=torch.bool)
    close(remax(double(token_rewards), baselines, scored, torch.tensor(masks), gamma=gamma), expected)
