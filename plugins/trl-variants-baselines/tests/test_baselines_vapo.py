"""VAPO: GAE whose lambda follows the length, the likelihood of correct completions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baselines_common import checked, close, double, numbers, recipe
from hypothesis import given
from hypothesis import strategies as st
from trl_variants_baselines import length_adaptive_gae, positive_nll

from trl_variants.testing import make_batch, make_rollout


def test_lambda_follows_the_length() -> None:
    # alpha 1: lengths 2 and 4 give lambda 1/2 and 3/4. V 0, reward 1 at the end: A_t = lambda^(last - t), returns 1.
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    rewards = double([[0, 1, 0, 0], [0, 0, 0, 1]])
    result = length_adaptive_gae(rewards, torch.zeros_like(rewards), mask, alpha=1.0)
    close(result.advantages, [[0.5, 1, 0, 0], [27 / 64, 9 / 16, 3 / 4, 1]])
    close(result.returns, [[1, 1, 0, 0], [1, 1, 1, 1]])
    # alpha .05: 1 - 1/(.05 * 40) = 1/2 at 40 tokens
    long = torch.ones(1, 40).bool()
    rewards = torch.zeros(1, 40, dtype=torch.float64)
    rewards[0, -1] = 1
    result = length_adaptive_gae(rewards, torch.zeros_like(rewards), long)
    close(result.advantages[0, -3:], [0.25, 0.5, 1.0])


def test_lambda_is_bounded_at_0_for_short_completions() -> None:
    # 1 - 1/(.05 * 3) is below 0: the TD errors, .2 - .1, .3 - .2, 1 - .3; returns with lambda 1: all of the reward
    result = length_adaptive_gae(double([[0, 0, 1]]), double([[0.1, 0.2, 0.3]]), torch.ones(1, 3))
    close(result.advantages, [[0.1, 0.1, 0.7]])
    close(result.returns, [[1.0, 1.0, 1.0]])


def test_the_critic_has_a_lambda_of_its_own() -> None:
    # lambda 0 for the critic: R_t = r_t + V_{t+1}
    result = length_adaptive_gae(double([[0, 0, 1]]), double([[0.1, 0.2, 0.3]]), torch.ones(1, 3), lam_returns=0.0)
    close(result.returns, [[0.2, 0.3, 1.0]])


def test_a_cut_completion_may_bootstrap() -> None:
    values, final, cut = double([[0.1, 0.2]]), double([0.5]), torch.tensor([True])
    result = length_adaptive_gae(double([[0, 0]]), values, torch.ones(1, 2), cut, final, bootstrap_truncated=True)
    close(result.returns, [[0.5, 0.5]])
    close(result.advantages, [[0.1, 0.3]])
    with pytest.raises(ValueError, match="bootstrap_truncated needs truncated and final_values"):
        length_adaptive_gae(double([[0, 0]]), values, torch.ones(1, 2), bootstrap_truncated=True)


@checked
@given(
    st.lists(st.lists(st.tuples(st.booleans(), numbers, numbers), min_size=5, max_size=5), min_size=1, max_size=3),
    st.sampled_from([0.05, 0.4, 2.0]),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([1.0, 0.5]),
)
def test_length_adaptive_gae_equals_a_loop(rows: list[Any], alpha: float, gamma: float, lam_returns: float) -> None:
    mask, rewards, values = ([[item[k] for item in row] for row in rows] for k in range(3))
    advantages, returns = [], []
    for on, r, v in zip(mask, rewards, values, strict=True):
        tokens = [t for t in range(5) if on[t]]
        lam = max(0.0, 1 - 1 / (alpha * max(len(tokens), 1)))
        a = critic = following = 0.0
        line, targets = [0.0] * 5, [0.0] * 5
        for t in reversed(tokens):
            delta = r[t] + gamma * following - v[t]
            a, critic, following = delta + gamma * lam * a, delta + gamma * lam_returns * critic, v[t]
            line[t], targets[t] = a, critic + v[t]
        advantages.append(line)
        returns.append(targets)
    got = length_adaptive_gae(
        double(rewards), double(values), torch.tensor(mask), alpha=alpha, gamma=gamma, lam_returns=lam_returns
    )
    close(got.advantages, advantages, atol=1e-9)
    close(got.returns, returns, atol=1e-9)


def test_the_likelihood_of_correct_completions_alone_is_raised() -> None:
    log_probs = double([[-0.5, -1.0], [-2.0, -3.0]]).requires_grad_()
    term = positive_nll(log_probs, double([1.0, 0.0]))
    term.sum().backward()
    close(term, [[0.5, 1.0], [0.0, 0.0]])
    close(log_probs.grad, [[-1.0, -1.0], [0.0, 0.0]])
    close(positive_nll(log_probs, double([1.0, 0.0]), threshold=-1.0), [[0.5, 1.0], [2.0, 3.0]])
    close(positive_nll(log_probs, double([1.0, 1.0]), torch.tensor([False, True])), [[0.0, 0.0], [2.0, 3.0]])


def test_the_loss_of_vapo_is_the_sum_of_its_three_terms() -> None:
    # On-policy, so -A: -1 and 2 over 2 + 1 tokens: (-1 - 1 + 2) / 3 = 0.
    # NLL of the first: .1 * (.5 + 1) / 3 = .05. Value: .1 * 1/2 (1 - 0)^2 over one of three tokens: 1/60.
    batch = make_batch(
        advantages=[[1.0], [-2.0]],
        log_probs=[[-0.5, -1.0], [-2.0, 0.0]],
        mask=[[1, 1], [1, 0]],
        values=[[0.0, 0.0], [0.0, 0.0]],
        old_values=[[0.0, 0.0], [0.0, 0.0]],
        returns=[[0.0, 0.0], [1.0, 0.0]],
        rewards=[1.0, 0.0],
        scored=[True, True],
    )
    loss = recipe("vapo", token_weight=None).loss(batch).loss
    assert float(loss) == pytest.approx(0.05 + 1 / 60, abs=1e-12)


def test_vapo_whitens_the_advantages_and_leaves_the_targets() -> None:
    rollout = make_rollout([1.0, 0.0], lengths=[2, 1], group_size=1, values=[[0.5, 0.5], [0.25, 0.0]])
    result = recipe("vapo").advantages(rollout)
    # lambda 0: TD errors 0, .5 and -.25; mean 1/12, population std sqrt((1 + 25 + 16) / 3) / 12
    std = (14**0.5) / 12
    close(result.advantages, [[-1 / 12 / std, 5 / 12 / std], [-4 / 12 / std, 0.0]], atol=1e-6)
    close(result.returns, [[1.0, 1.0], [0.0, 0.0]])
