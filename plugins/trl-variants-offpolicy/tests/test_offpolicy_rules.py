"""Clip rules of DPPO and TOPR: the loss, whose gradient is taken away, and what is counted as clipped."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl_variants_offpolicy.dppo import dppo_kl, dppo_tv
from trl_variants_offpolicy.topr import topr

from tests.components.common import checked, close, double
from trl_variants import VariantError, load_registry, resolve
from trl_variants.testing import make_batch

REGISTRY = load_registry("none", extra=["trl_variants_offpolicy"])
NAN = math.nan

# pi, mu (who drew the token), A -> gradient with respect to log pi: -min(pi / mu, 20) A where kept; low, high.
TV = [  # D = |pi - mu|, delta .15
    (0.9, 0.5, 1.0, 0.0, False, True),  # D .4, and A wants more
    (0.9, 0.5, -1.0, 1.8, False, False),  # and A wants less: on its way back
    (0.5, 0.9, -1.0, 0.0, True, False),
    (0.5, 0.9, 1.0, -5 / 9, False, False),
    (0.6, 0.5, 1.0, -1.2, False, False),  # D .1
    (0.002, 0.001, 1.0, -2.0, False, False),  # D .001: PPO would clip
    (0.1, 0.001, 1.0, -20.0, False, False),  # D .099; the ratio of 100 is cut to 20
    (0.5, 0.5, -1.0, 1.0, False, False),
    (0.9, 0.1, 0.0, 0.0, False, False),  # A = 0: no loss, not counted
]
KL = [  # D = mu ln(mu / pi) + (1 - mu) ln((1 - mu) / (1 - pi)), delta .05
    (0.9, 0.5, 1.0, 0.0, False, True),  # .5 ln(.5/.9) + .5 ln(.5/.1) = .5108
    (0.9, 0.5, -1.0, 1.8, False, False),
    (0.5, 0.9, -1.0, 0.0, True, False),  # .9 ln 1.8 + .1 ln .2 = .3681
    (0.6, 0.5, 1.0, -1.2, False, False),  # .5 ln(.5/.6) + .5 ln(.5/.4) = .0204
    (0.7, 0.5, 1.0, 0.0, False, True),  # .5 ln(.5/.7) + .5 ln(.5/.3) = .0872
    (0.002, 0.001, 1.0, -2.0, False, False),  # .001 ln .5 + .999 ln(.999/.998) = .0003
    (0.1, 0.001, 1.0, 0.0, False, True),  # .001 ln .01 + .999 ln(.999/.9) = .0996
    (0.05, 0.001, 1.0, -20.0, False, False),  # .001 ln .02 + .999 ln(.999/.95) = .0464; the ratio of 50 is cut
]


@pytest.mark.parametrize(("rule", "row"), [*((dppo_tv, row) for row in TV), *((dppo_kl, row) for row in KL)])
def test_dppo_by_hand(rule: object, row: tuple) -> None:
    now, drawn, advantage, gradient, low, high = row
    log_probs = double([[math.log(now)]]).requires_grad_()
    old = double([[-3.0]])  # read by neither, as the engine gave log-probs
    result = rule(log_probs, old, double([[advantage]]), double([[math.log(drawn)]]))  # type: ignore[operator]
    result.loss.sum().backward()
    close(result.loss, [[gradient * math.log(now)]])
    close(log_probs.grad, [[gradient]])
    assert (result.low.item(), result.high.item()) == (low, high)
    # Through a variant: one token, so its mean is the token's own loss.
    log_probs.grad = None
    batch = make_batch(
        advantages=[advantage],
        log_probs=log_probs,
        old_log_probs=old,
        sampling_log_probs=double([[math.log(drawn)]]),
    )
    through = resolve(rule.__name__, None, REGISTRY).loss(batch)  # type: ignore[attr-defined]
    through.loss.backward()
    close(log_probs.grad, [[gradient]])
    assert float(through.metrics["clip_ratio/low_mean"]) == low
    assert float(through.metrics["clip_ratio/high_mean"]) == high


@pytest.mark.parametrize("rule", [dppo_tv, dppo_kl])
def test_where_the_engine_gives_nothing_the_old_policy_stands_in(rule: object) -> None:
    now, old = double([[0.9, 0.9]]).log(), double([[0.5, 0.5]]).log()
    engine = double([[NAN, math.log(0.9)]])  # it could not score the first token
    advantages = double([[1.0]])
    assert rule(now, old, advantages).high.tolist() == [[True, True]]  # type: ignore[operator]
    assert rule(now, old, advantages, engine).high.tolist() == [[True, False]]  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kl_is_finite_and_right_next_to_certainty(dtype: torch.dtype) -> None:
    # Engines round log-probs of near-certain tokens to 0. mu = 1, pi = .999: D = ln(1 / .999) = .0010005, kept;
    # pi = .9: D = .10536, masked (A < 0, r < 1). mu = pi = 1: D = 0.
    now = torch.tensor([[0.999, 0.9, 1.0]], dtype=dtype).log().requires_grad_()
    engine, advantages = torch.zeros(1, 3, dtype=dtype), torch.tensor([[-1.0]], dtype=dtype)
    result = dppo_kl(now, engine, advantages, engine)
    result.loss.sum().backward()
    assert result.low.tolist() == [[False, True, False]]
    torch.testing.assert_close(now.grad, torch.tensor([[0.999, 0.0, 1.0]], dtype=dtype))


tokens = st.lists(
    st.tuples(st.integers(1, 99), st.integers(1, 99), st.sampled_from([-2.0, -1.0, 0.0, 1.0, 0.5])),
    min_size=1,
    max_size=6,
)


@checked
@given(tokens, st.sampled_from([0.0501, 0.2007]), st.sampled_from([0.1003, 0.3001]), st.sampled_from([None, 1.5]))
def test_dppo_equals_a_loop(drawn: list, delta_low: float, delta_high: float, cap: float | None) -> None:
    for rule in (dppo_tv, dppo_kl):
        losses, lows, highs = [], [], []
        for a, b, advantage in drawn:
            pi, mu = a / 100, b / 100
            kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
            divergence = abs(pi - mu) if rule is dppo_tv else kl
            lows.append(advantage < 0 and pi < mu and divergence > delta_low)
            highs.append(advantage > 0 and pi > mu and divergence > delta_high)
            kept = not (lows[-1] or highs[-1])
            losses.append(-min(pi / mu, cap or math.inf) * advantage * math.log(pi) if kept else 0.0)
        now, then, advantages = (double([list(column)]) for column in zip(*drawn, strict=True))
        result = rule(
            (now / 100).log(),
            (then / 100).log(),
            advantages,
            delta_low=delta_low,
            delta_high=delta_high,
            ratio_max=cap,
        )
        close(result.loss, [losses], atol=1e-10)
        assert (result.low.tolist(), result.high.tolist()) == ([lows], [highs])


# -- TOPR --------------------------------------------------------------------------------------------------------------

# Two valid tokens with pi .5, .2; per token and product of pi / mu; gradient -w A, w = 1 or min(ratio, 1).
TOPR = [
    ((0.5, 0.4), 1.0, "sequence", (-1.0, -1.0), False),  # ratio .5, and A > 0: no ratio
    ((0.5, 0.4), -1.0, "sequence", (0.5, 0.5), False),
    ((0.5, 0.4), -1.0, "token", (1.0, 0.5), False),
    ((0.5, 0.1), -2.0, "sequence", (2.0, 2.0), True),  # ratio 2, cut to 1
    ((0.25, 0.8), -1.0, "sequence", (0.5, 0.5), False),  # 2 * 1/4
    ((0.25, 0.8), -1.0, "token", (1.0, 0.25), True),  # 2 is cut to 1 (the first token), 1/4 stays
    ((0.5, 0.1), 0.0, "sequence", (0.0, 0.0), False),
]


@pytest.mark.parametrize(("drawn", "advantage", "level", "gradient", "cut"), TOPR)
def test_topr_by_hand(drawn: tuple, advantage: float, level: str, gradient: tuple, cut: bool) -> None:
    log_probs = double([[math.log(0.5), math.log(0.2), -1.0]]).requires_grad_()
    engine = double([[*map(math.log, drawn), -9.0]])
    mask = torch.tensor([[1, 1, 0]])
    result = topr(log_probs, double([[-3.0] * 3]), double([[advantage]]), mask, engine, level=level)
    result.loss[mask.bool()].sum().backward()
    close(log_probs.grad, [[*gradient, 0.0]])
    close(result.loss[:, :2], [[gradient[0] * math.log(0.5), gradient[1] * math.log(0.2)]])
    assert result.high[0, 0].item() == cut
    # Where the engine gives nothing, the old policy stands in.
    close(topr(log_probs, engine, double([[advantage]]), mask, level=level).loss, result.loss)


@checked
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=3, max_size=3), min_size=1, max_size=4
    ),
    st.sampled_from(["sequence", "token"]),
    st.data(),
)
def test_topr_equals_a_loop(rows: list, level: str, data: st.DataObject) -> None:
    advantages = data.draw(st.lists(st.sampled_from([-1.5, -1.0, 0.0, 2.0]), min_size=len(rows), max_size=len(rows)))
    expected = []
    for row, advantage in zip(rows, advantages, strict=True):
        ratios = [a / b for a, b in row]
        if level == "sequence":
            ratios = [math.prod(ratios)] * 3
        weights = [1.0 if advantage >= 0 else min(ratio, 1.0) for ratio in ratios]
        expected.append([-w * advantage * math.log(a / 100) for w, (a, _) in zip(weights, row, strict=True)])
    table = double(rows)
    now, then = (table[..., 0] / 100).log(), (table[..., 1] / 100).log()
    got = topr(now, then, double(advantages)[:, None], torch.ones(len(rows), 3), level=level)
    close(got.loss, expected, atol=1e-10)


def test_topr_may_use_a_rollout_more_than_once() -> None:
    assert resolve("topr", None, REGISTRY).variant.max_updates_per_rollout is None
    assert resolve("reinforce", None, REGISTRY).variant.max_updates_per_rollout == 1


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"delta_low": 0}, "'dppo_tv': delta_low (0.0) must be above 0"),
        ({"delta_high": 1}, "'dppo_tv': delta_high (1.0) is a difference of probabilities, so below 1"),
        ({"ratio_max": 1}, "'dppo_tv': ratio_max (1.0) is a cap on the ratio itself, so above 1"),
        ({"name": "dppo_kl", "delta_high": -1}, "'dppo_kl': delta_high (-1.0) must be above 0"),
        (
            {"name": "topr", "level": "turn"},
            "'topr': level must be one of 'sequence', 'token', not 'turn'",
        ),
        ({"name": "m2po", "threshold": 0}, "'m2po': threshold (0.0) must be above 0"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(rule: dict, message: str) -> None:
    with pytest.raises(VariantError) as error:
        resolve("dppo_tv", {"clip_rule": rule}, REGISTRY)
    assert str(error.value) == f"clip_rule {message}."


@pytest.mark.parametrize("variant", ["dppo_tv", "dppo_kl", "topr", "m2po"])
def test_a_ratio_beside_these_rules_is_refused(variant: str) -> None:
    with pytest.raises(VariantError, match="^importance_ratio 'token' has no effect: clip_rule"):
        resolve(variant, {"importance_ratio": "token"}, REGISTRY)
