"""Clip rules: the loss, whose gradient is taken away on which side, and what is counted as clipped."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.components.common import checked, close, double
from trl_variants import VariantError, resolve
from trl_variants.components.clip_rules import cispo, dual_clip, policy_gradient, ppo_clip
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch

REGISTRY = load_registry("none")

# ratio, advantage -> loss, gradient with respect to log pi, low, high. Bounds 1 -+ 0.2.
PPO = [
    # d(-rho A)/d(log pi) = -rho A where it is kept
    (1.5, 1.0, -1.2, 0.0, False, True),  # above, and A wants more: -1.2 A, no gradient
    (1.5, -1.0, 1.5, 1.5, False, False),  # above, and A wants less: kept, it pulls rho back
    (0.5, 1.0, -0.5, -0.5, False, False),  # below, and A wants more: kept
    (0.5, -1.0, 0.8, 0.0, True, False),  # below, and A wants less: .8, no gradient
    (1.1, 1.0, -1.1, -1.1, False, False),
    (0.9, -1.0, 0.9, 0.9, False, False),
    (1.0, 1.0, -1.0, -1.0, False, False),
    (1.0, -1.0, 1.0, 1.0, False, False),
    (1.5, 0.0, 0.0, 0.0, False, False),
]
DUAL = [  # as PPO, and where A < 0 the loss is at most c |A|, c = 3
    *((*row, False) for row in PPO),
    (10.0, -1.0, 3.0, 0.0, False, False, True),
    (2.0, -1.0, 2.0, 2.0, False, False, False),
    (10.0, 1.0, -1.2, 0.0, False, True, False),
]
CISPO = [  # loss -min(rho, 5) A log pi at log pi = -2; gradient -min(rho, 5) A
    (10.0, 1.0, 10.0, -5.0, True),  # pains C02: capped, and it still learns
    (10.0, -1.0, -10.0, 5.0, True),
    (0.1, 1.0, 0.2, -0.1, False),  # no lower bound
    (0.1, -1.0, -0.2, 0.1, False),
    (1.0, 1.0, 2.0, -1.0, False),
    (10.0, 0.0, 0.0, 0.0, False),
]


def one_token(name: str, ratio: float, advantage: float, **parameters: float) -> tuple:
    """Loss, gradient and clip metrics of one token at log pi = -2, through a recipe without KL."""
    log_probs = double([[-2.0]]).requires_grad_()
    batch = make_batch(advantages=[advantage], log_probs=log_probs, old_log_probs=double([[-2.0 - math.log(ratio)]]))
    recipe = resolve("grpo", {"kl": None, "clip_rule": {"name": name, **parameters}}, REGISTRY)
    result = recipe.loss(batch)
    result.loss.backward()
    return float(result.loss.detach()), float(log_probs.grad), {k: float(v) for k, v in result.metrics.items()}


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "low", "high"), PPO)
def test_ppo_clip(ratio: float, advantage: float, loss: float, gradient: float, low: bool, high: bool) -> None:
    log_ratio = double([[math.log(ratio)]]).requires_grad_()
    result = ppo_clip(log_ratio, double([[advantage]]))
    result.loss.sum().backward()
    close(result.loss, [[loss]])
    close(log_ratio.grad, [[gradient]])
    assert (result.low.tolist(), result.high.tolist()) == ([[low]], [[high]])
    through = one_token("ppo_clip", ratio, advantage, epsilon_low=0.2, epsilon_high=0.2)
    assert through[:2] == pytest.approx((loss, gradient), abs=1e-12)
    assert through[2]["clip_ratio/low_mean"] == low
    assert through[2]["clip_ratio/high_mean"] == high
    assert through[2]["clip_ratio/region_mean"] == (low or high)


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "low", "high", "dual"), DUAL)
def test_dual_clip(
    ratio: float, advantage: float, loss: float, gradient: float, low: bool, high: bool, dual: bool
) -> None:
    log_ratio = double([[math.log(ratio)]]).requires_grad_()
    result = dual_clip(log_ratio, double([[advantage]]))
    result.loss.sum().backward()
    close(result.loss, [[loss]])
    close(log_ratio.grad, [[gradient]])
    assert (result.low.item(), result.high.item(), result.dual.item()) == (low, high, dual)
    through = one_token("dual_clip", ratio, advantage, c=3.0)
    assert through[:2] == pytest.approx((loss, gradient), abs=1e-12)
    assert through[2]["clip_ratio/dual_mean"] == dual


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "high"), CISPO)
def test_cispo(ratio: float, advantage: float, loss: float, gradient: float, high: bool) -> None:
    log_probs = double([[-2.0]]).requires_grad_()
    log_ratio = double([[math.log(ratio)]]).requires_grad_()
    result = cispo(log_ratio, log_probs, double([[advantage]]))
    result.loss.sum().backward()
    close(result.loss, [[loss]])
    close(log_probs.grad, [[gradient]])
    assert log_ratio.grad is None  # the weight is detached
    assert (result.low, result.high.item()) == (None, high)
    through = one_token("cispo", ratio, advantage)
    assert through[:2] == pytest.approx((loss, gradient), abs=1e-12)
    assert through[2]["clip_ratio/high_mean"] == high
    assert "clip_ratio/low_mean" not in through[2]


def test_policy_gradient() -> None:
    log_probs = double([[-2.0, -1.0]]).requires_grad_()
    result = policy_gradient(log_probs, double([[3.0]]))
    result.loss.sum().backward()
    close(result.loss, [[6.0, 3.0]])
    close(log_probs.grad, [[-3.0, -3.0]])
    assert (result.low, result.high, result.dual) == (None, None, None)


def test_document_003s_formula_of_dual_clip_would_stop_every_negative_advantage() -> None:
    """max(min(rho A, clip(rho) A), (1 - eps) A) has no gradient at rho = 1, A = -1; the paper's has."""
    log_ratio = double([[0.0]]).requires_grad_()
    ratio, a = log_ratio.exp(), -1.0
    written = -torch.max(torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a), double([[0.8 * a]]))
    written.sum().backward()
    close(log_ratio.grad, [[0.0]])
    assert one_token("dual_clip", 1.0, -1.0)[1] == pytest.approx(1.0)


def test_only_binding_clips_are_counted() -> None:  # pains C08
    ratios, advantages = [1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0]
    old = -2.0 - double([ratios]).log()
    batch = make_batch(advantages=[advantages], log_probs=double([[-2.0] * 4]), old_log_probs=old)
    for rule in ("ppo_clip", "dual_clip"):
        metrics = resolve("grpo", {"kl": None, "clip_rule": rule}, REGISTRY).loss(batch).metrics
        assert float(metrics["clip_ratio/low_mean"]) == 1 / 4
        assert float(metrics["clip_ratio/high_mean"]) == 1 / 4
        assert float(metrics["clip_ratio/region_mean"]) == 1 / 2
        assert float(metrics["clip_ratio/region_mean"].total) == 2  # exactly two tokens


def test_masked_tokens_are_in_no_clip_fraction() -> None:
    batch = make_batch(advantages=[[1.0, 1.0]], log_probs=[[-1.0, -1.0]], old_log_probs=[[-1.0, -5.0]], mask=[[1, 0]])
    metrics = resolve("dr_grpo", registry=REGISTRY).loss(batch).metrics
    assert float(metrics["clip_ratio/region_mean"]) == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "cispo"])
def test_a_log_ratio_of_200_is_finite_in_value_and_gradient(name: str, log_ratio: float, advantage: float) -> None:
    leaf = torch.tensor([[log_ratio]], requires_grad=True)
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    if name == "cispo":
        result = cispo(leaf, log_probs, torch.tensor([[advantage]]))
    else:
        result = {"ppo_clip": ppo_clip, "dual_clip": dual_clip}[name](leaf, torch.tensor([[advantage]]))
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in (leaf, log_probs))


@checked
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-4, 4)), min_size=1, max_size=6),
    st.sampled_from([0.1, 0.2]),
    st.sampled_from([0.15, 0.28]),
)
def test_losses_equal_a_loop(tokens: list[tuple[float, float]], low: float, high: float) -> None:
    log_ratio, advantages = (double([list(column)]) for column in zip(*tokens, strict=True))
    single, double_bound, capped, clipped = [], [], [], []
    for x, a in tokens:
        r = math.exp(x)
        inside = min(max(r, 1 - low), 1 + high)
        single.append(-min(r * a, inside * a))
        double_bound.append(min(single[-1], 3 * -a) if a < 0 else single[-1])
        capped.append(-min(r, 5.0) * a * -2.0)
        clipped.append((r > 1 + high and a > 0) or (r < 1 - low and a < 0))
    result = ppo_clip(log_ratio, advantages, epsilon_low=low, epsilon_high=high)
    close(result.loss, [single], atol=1e-10)
    assert (result.low | result.high).tolist() == [clipped]
    close(dual_clip(log_ratio, advantages, epsilon_low=low, epsilon_high=high).loss, [double_bound], atol=1e-10)
    close(cispo(log_ratio, torch.full_like(log_ratio, -2.0), advantages).loss, [capped], atol=1e-10)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"name": "dual_clip", "c": 0.5},  # pains C04
            "clip_rule 'dual_clip': c (0.5) must be above 1 + epsilon_high (1.2).",
        ),
        (
            {"name": "dual_clip", "c": 1.25, "epsilon_high": 0.25},
            "clip_rule 'dual_clip': c (1.25) must be above 1 + epsilon_high (1.25).",
        ),
        (
            {"name": "ppo_clip", "epsilon_low": 1},  # pains C16
            "clip_rule 'ppo_clip': epsilon_low (1.0) must be at least 0 and below 1.",
        ),
        (
            {"name": "ppo_clip", "epsilon_high": -0.1},
            "clip_rule 'ppo_clip': epsilon_high (-0.1) must not be negative.",
        ),
        (
            {"name": "dual_clip", "epsilon_low": -0.1},
            "clip_rule 'dual_clip': epsilon_low (-0.1) must be at least 0 and below 1.",
        ),
        (
            {"name": "cispo", "epsilon_max": 0.2},
            "clip_rule 'cispo': epsilon_max (0.2) is a cap on the ratio itself, so above 1.",
        ),
    ],
)
def test_bounds_out_of_range_are_refused(rule: dict, message: str) -> None:
    with pytest.raises(VariantError) as error:
        resolve("grpo", {"kl": None, "clip_rule": rule}, REGISTRY)
    assert str(error.value) == message


@pytest.mark.parametrize("rule", ["ppo_clip", "dual_clip", "cispo"])
def test_a_clip_without_a_ratio_is_refused_naming_both(rule: str) -> None:  # pains C05
    with pytest.raises(VariantError) as error:
        resolve("reinforce", {"clip_rule": rule}, REGISTRY)
    assert str(error.value) == (
        f"clip_rule '{rule}' clips a ratio, and importance_ratio 'none' fixes it at 1. "
        "Use clip_rule: policy_gradient, or importance_ratio: token."
    )
