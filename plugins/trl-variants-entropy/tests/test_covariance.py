"""Clip-Cov and KL-Cov: which tokens they act on, what they do there, and that nothing but the tokens decides it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import trl_variants_entropy
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trl_variants_entropy.choice import quota, token_keys
from trl_variants_entropy.covariance import clip_cov, covariances, kl_cov

from tests.components.common import checked, close, double, tables
from trl_variants import VariantError, resolve
from trl_variants.registry import Owner, load_registry
from trl_variants.testing import make_batch

REGISTRY = load_registry("none")
REGISTRY.add(trl_variants_entropy, Owner("trl-variants-entropy", "trl_variants_entropy", "0.1.0"))
LN2 = math.log(2)

# Mean log-prob -2, mean advantage 0, so the covariances are 1·2, -1·2, 0·-2, 0·-2.
LOG_PROBS, ADVANTAGES = [[-1.0, -3.0], [-2.0, -2.0]], [[2.0], [-2.0]]


def alone(tensor: Tensor) -> Tensor:
    return tensor


def metrics(result: Any) -> dict[str, float]:
    return {name: float(metric) for name, metric in result.metrics.items() if name.startswith("clip_ratio")}


# -- the covariance ------------------------------------------------------------------------------------------------


def test_covariances_by_hand() -> None:
    got, tokens = covariances(double(LOG_PROBS), double(ADVANTAGES), torch.ones(2, 2), alone)
    close(got, [[2.0, -2.0], [0.0, 0.0]])
    assert tokens == 4
    # Without the last token: mean log-prob -2, mean advantage 2/3, so 1·4/3, -1·4/3, 0.
    mask = torch.tensor([[1, 1], [1, 0]])
    got, tokens = covariances(double([[-1.0, -3.0], [-2.0, math.nan]]), double(ADVANTAGES), mask, alone)
    close(got, [[4 / 3, -4 / 3], [0.0, 0.0]])
    assert tokens == 3


@pytest.mark.parametrize(
    ("tokens", "share", "at_least", "number"),
    [(10_000, 2e-4, 0, 2), (9_999, 2e-4, 0, 1), (9_999, 2e-4, 1, 1), (100, 2e-4, 0, 0), (100, 2e-4, 1, 1)]
    + [(100, 0.29, 0, 29), (3, 1.0, 0, 3), (3, 0.5, 5, 3), (0, 0.5, 1, 0)],
)
def test_a_share_is_rounded_down_and_bounded(tokens: int, share: float, at_least: int, number: int) -> None:
    assert quota(tokens, share, at_least) == number


# -- Clip-Cov ------------------------------------------------------------------------------------------------------


def test_clip_cov_by_hand() -> None:
    """Only the covariance 2 lies in [1, 5]: that token has neither loss nor gradient, and still counts as one."""
    log_probs = double(LOG_PROBS).requires_grad_()
    batch = make_batch(advantages=ADVANTAGES, log_probs=log_probs, old_log_probs=double(LOG_PROBS) - LN2)
    result = resolve("clip_cov", registry=REGISTRY).loss(batch)
    result.loss.backward()
    close(result.loss, (0.0 - 4.0 + 4.0 + 4.0) / 4)  # ρ = 2: -ρA; four tokens
    close(log_probs.grad, [[0.0, -1.0], [1.0, 1.0]])  # -ρA / 4
    assert metrics(result) == {
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": 0.0,
        "clip_ratio/region_mean": 0.0,
        "clip_ratio/dual_mean": 0.25,
        "clip_ratio/low_min": 0.0,
        "clip_ratio/high_max": 0.0,
    }


@pytest.mark.parametrize(
    ("bounds", "drawn"),
    [  # the bounds themselves are inside, as the paper writes them
        ((1.0, 5.0), [[True, False], [False, False]]),
        ((2.0, 5.0), [[True, False], [False, False]]),
        ((1.0, 2.0), [[True, False], [False, False]]),
        ((2.1, 5.0), [[False, False], [False, False]]),
        ((1.0, 1.9), [[False, False], [False, False]]),
        ((-3.0, -1.0), [[False, True], [False, False]]),
    ],
)
def test_the_bounds_say_which_tokens_may_be_drawn(bounds: tuple[float, float], drawn: list[list[bool]]) -> None:
    now, zero = double(LOG_PROBS), torch.zeros(2, 2, dtype=torch.float64)
    got = clip_cov(
        zero, now, double(ADVANTAGES), torch.ones(2, 2), alone, 0, clip_cov_lb=bounds[0], clip_cov_ub=bounds[1]
    )
    assert got.dual.tolist() == drawn


def test_a_token_that_the_ratio_s_clip_stops_is_not_drawn_and_is_reported_as_high() -> None:
    now = double(LOG_PROBS)
    log_ratio = double([[math.log(2.5), 0.0], [math.log(0.5), 0.0]])
    got = clip_cov(log_ratio, now, double(ADVANTAGES), torch.ones(2, 2), alone, 0)
    close(got.loss, [[-4.0, -2.0], [1.0, 2.0]])  # ρ = 2.5 is above 1 + 1: -2·2; ρ = .5 is never below 1 - 1
    assert (got.low.any().item(), got.high.tolist(), got.dual.any().item()) == (
        False,
        [[True, False], [False, False]],
        False,
    )
    got = clip_cov(log_ratio, now, double(ADVANTAGES), torch.ones(2, 2), alone, 0, epsilon_low=0.2, epsilon_high=0.2)
    close(got.loss, [[-2.4, -2.0], [1.6, 2.0]])  # PPO's: -1.2·2 and .8·2
    assert got.low.tolist() == [[False, False], [True, False]]


@checked
@given(
    tables("log_probs", "log_ratio", "advantages"),
    st.sampled_from([0.1, 0.34, 0.5, 1.0]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([(1.0, 1.0), (0.2, 0.28)]),
)
def test_clip_cov_equals_a_loop(table: dict, share: float, at_least: int, epsilons: tuple[float, float]) -> None:
    mask = torch.tensor(table["mask"])
    log_probs, log_ratio, advantages = (double(table[name]) for name in ("log_probs", "log_ratio", "advantages"))
    tokens = [(i, t) for i, row in enumerate(table["mask"]) for t, valid in enumerate(row) if valid]
    count = len(tokens)
    mean = sum(table["log_probs"][i][t] for i, t in tokens) / max(count, 1)
    middle = sum(table["advantages"][i][t] for i, t in tokens) / max(count, 1)
    losses, candidates, low, high = {}, set(), set(), set()
    for i, t in tokens:
        ratio, advantage = math.exp(table["log_ratio"][i][t]), table["advantages"][i][t]
        inside = min(max(ratio, 1 - epsilons[0]), 1 + epsilons[1])
        losses[i, t] = -min(ratio * advantage, inside * advantage)
        low |= {(i, t)} if ratio < 1 - epsilons[0] and advantage < 0 else set()
        high |= {(i, t)} if ratio > 1 + epsilons[1] and advantage > 0 else set()
        covariance = (table["log_probs"][i][t] - mean) * (advantage - middle)
        if 1.0 - 1e-12 <= covariance <= 5.0 + 1e-12 and (i, t) not in low | high:
            candidates.add((i, t))
    got = clip_cov(
        log_ratio,
        log_probs,
        advantages,
        mask,
        alone,
        3,
        clip_cov_ratio=share,
        clip_cov_lb=1.0 - 1e-12,
        clip_cov_ub=5.0 + 1e-12,
        at_least=at_least,
        epsilon_low=epsilons[0],
        epsilon_high=epsilons[1],
    )

    def where(flags: Tensor) -> set[tuple[int, int]]:
        return {(i, t) for i, t in (flags & mask).nonzero().tolist()}

    drawn = where(got.dual)
    assert where(got.dual) == {(i, t) for i, t in got.dual.nonzero().tolist()}, "a masked token was drawn"
    assert drawn <= candidates
    assert (where(got.low), where(got.high)) == (low, high)
    wanted = min(max(math.floor(share * count + 1e-9), at_least), count, len(candidates))
    key = token_keys(log_probs, advantages, mask, 3)
    most = max((int(key[i, t]) for i, t in drawn), default=0)
    twins = sum(int(key[i, t]) == most for i, t in drawn)
    assert wanted <= len(drawn) <= max(wanted - 1 + twins, 0)  # equal tokens are drawn together
    for i, t in tokens:
        close(got.loss[i, t], 0.0 if (i, t) in drawn else losses[i, t], atol=1e-9)


# -- KL-Cov --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("penalty", "kl", "slope"),
    [  # log ρ = ln 2: |log ρ|, of slope 1; ρ - 1 - log ρ, of slope ρ - 1
        ("abs", LN2, 1.0),
        ("k3", 1 - LN2, 1.0),
    ],
)
def test_kl_cov_by_hand(penalty: str, kl: float, slope: float) -> None:
    """A quarter of four tokens: the one of covariance 2. Its loss is -ρA + β KL, the others' -ρA."""
    log_probs = double(LOG_PROBS).requires_grad_()
    batch = make_batch(advantages=ADVANTAGES, log_probs=log_probs, old_log_probs=double(LOG_PROBS) - LN2)
    rule = {"clip_rule": {"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.5, "penalty": penalty}}
    result = resolve("kl_cov", rule, REGISTRY).loss(batch)
    result.loss.backward()
    close(result.loss, (-4.0 - 4.0 + 4.0 + 4.0 + 0.5 * kl) / 4)
    close(log_probs.grad, [[(-4.0 + 0.5 * slope) / 4, -1.0], [1.0, 1.0]])
    assert metrics(result) == {}  # every token keeps its gradient: nothing is clipped


@pytest.mark.parametrize(("penalty", "kl", "slope"), [("abs", LN2, -1.0), ("k3", LN2 - 0.5, -0.5)])
def test_kl_cov_pulls_back_from_below_too(penalty: str, kl: float, slope: float) -> None:
    now = double(LOG_PROBS).requires_grad_()
    old = double(LOG_PROBS) + LN2  # ρ = 1/2
    got = kl_cov(now - old, now, old, double(ADVANTAGES), torch.ones(2, 2), alone, 0, penalty=penalty)
    got.loss.sum().backward()
    close(got.loss, [[-1.0 + kl, -1.0], [1.0, 1.0]])
    close(now.grad, [[-1.0 + slope, -1.0], [1.0, 1.0]])


@checked
@given(tables("log_probs", "old", "advantages"), st.sampled_from([0.1, 0.34, 0.5, 1.0]), st.sampled_from([0, 1]))
def test_kl_cov_equals_a_loop(table: dict, share: float, at_least: int) -> None:
    mask = torch.tensor(table["mask"])
    now, old, advantages = (double(table[name]) for name in ("log_probs", "old", "advantages"))
    tokens = [(i, t) for i, row in enumerate(table["mask"]) for t, valid in enumerate(row) if valid]
    covariance, _ = covariances(now, advantages, mask, alone)
    key = token_keys(now, advantages, mask, 7)
    # Largest covariance first; of equal ones, as after a tie, the least key.
    order = sorted(tokens, key=lambda token: (-float(covariance[token]), int(key[token])))
    number = min(max(math.floor(share * len(tokens) + 1e-9), at_least), len(tokens))
    held = set(order[:number])
    if number:  # tokens with the same covariance and key go together
        last = order[number - 1]
        same = [x for x in tokens if covariance[x] == covariance[last] and key[x] == key[last]]
        held |= set(same)
    got = kl_cov(now - old, now, old, advantages, mask, alone, 7, kl_cov_ratio=share, at_least=at_least)
    for i, t in tokens:
        apart = table["log_probs"][i][t] - table["old"][i][t]
        want = -math.exp(apart) * table["advantages"][i][t] + (abs(apart) if (i, t) in held else 0.0)
        close(got.loss[i, t], want, atol=1e-9 * max(1, abs(want)))


def test_where_all_covariances_are_equal_no_more_tokens_are_held_than_the_share() -> None:
    """Equal advantages: every covariance is 0. A threshold alone would hold all 64 tokens."""
    now = -torch.rand(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    old = now - 1.0
    got = kl_cov(now - old, now, old, torch.ones(4, 1), torch.ones(4, 16), alone, 0, kl_cov_ratio=0.125)
    assert int((got.loss > -math.e + 0.5).sum()) == 8
    at_another_step = kl_cov(now - old, now, old, torch.ones(4, 1), torch.ones(4, 16), alone, 1, kl_cov_ratio=0.125)
    assert not torch.equal(got.loss, at_another_step.loss)


@pytest.mark.parametrize("penalty", ["abs", "k3"])
def test_kl_cov_has_the_plain_gradient_at_ratio_1(penalty: str) -> None:
    now = double(LOG_PROBS).requires_grad_()
    old = now.detach()
    kl_cov(now - old, now, old, double(ADVANTAGES), torch.ones(2, 2), alone, 0, penalty=penalty).loss.sum().backward()
    close(now.grad, [[-2.0, -2.0], [2.0, 2.0]])


@pytest.mark.parametrize(
    ("variant", "parameters", "message"),
    [
        ("clip_cov", {"clip_cov_lb": 5, "clip_cov_ub": 1}, "clip_cov_lb (5.0) must be below clip_cov_ub (1.0)"),
        ("clip_cov", {"clip_cov_ratio": 0}, "clip_cov_ratio (0.0) is a share of the tokens, so above 0 and at most 1"),
        ("clip_cov", {"at_least": -1}, "at_least (-1) must not be negative"),
        ("clip_cov", {"epsilon_low": 1.5}, "epsilon_low (1.5) must be at least 0 and at most 1"),
        ("clip_cov", {"epsilon_high": -0.5}, "epsilon_high (-0.5) must not be negative"),
        ("kl_cov", {"kl_cov_ratio": 2}, "kl_cov_ratio (2.0) is a share of the tokens, so above 0 and at most 1"),
        ("kl_cov", {"ppo_kl_coef": 0}, "ppo_kl_coef (0.0) must be above 0"),
        ("kl_cov", {"penalty": "k1"}, "penalty must be one of 'abs', 'k3', not 'k1'"),
    ],
)
def test_parameters_out_of_range_are_refused(variant: str, parameters: dict, message: str) -> None:
    with pytest.raises(VariantError) as error:
        resolve(variant, {"clip_rule": parameters}, REGISTRY)
    assert str(error.value) == f"clip_rule '{variant}': {message}."
