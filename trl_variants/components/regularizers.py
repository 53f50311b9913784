"""Regularizers: terms of the loss besides the policy's. Each is a mean over the step's tokens, times its ``coef``.

So a term has the same strength under every loss aggregator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trl_variants.components.masked import masked_sum, select
from trl_variants.declaration import component

__all__ = ["adaptive_entropy", "entropy_bonus", "value_clipped", "value_loss"]


@component(paper="https://arxiv.org/abs/1602.01783", formula=r"-H_{i,t}")
def entropy_bonus(entropies: Tensor) -> Tensor:
    """Reward entropy, against early collapse: term = -H.

    Args:
        entropies: (B, T) entropy of the next-token distribution, in nats, with gradient.

    Returns:
        (B, T).

    References:
        Mnih et al., A3C, https://arxiv.org/abs/1602.01783; document 001.

    Example:
        >>> entropy_bonus(torch.tensor([[0.5]]))
        tensor([[-0.5000]])
    """
    return -entropies


@component(
    paper="https://arxiv.org/abs/2505.22312",
    formula=r"-\alpha\, H_{i,t}, \quad \alpha \leftarrow \alpha \pm {delta} \text{ to hold } H = {target}",
    check=lambda p: (
        (p.delta > 0 and p.low <= p.start <= p.high) or "delta must be above 0, and low <= start <= high must hold"
    ),
)
def adaptive_entropy(
    entropies: Tensor,
    mask: Tensor,
    gather: Callable[[Tensor], Tensor],
    step: int,
    state: dict[str, Any],
    *,
    target: float = 0.2,
    delta: float = 0.005,
    start: float = 0.0,
    low: float = 0.0,
    high: float = 1.0,
) -> tuple[Tensor, dict[str, Any]]:
    """An entropy bonus whose coefficient α rises while entropy is at or below a target, and falls otherwise.

    Once per optimizer step, from the mean entropy H of the step before: α ← α + δ where H ≤ target, else α - δ, within
    [low, high]; and the bonus α H applies only where H ≤ target. No bonus before the first measurement.

    Args:
        entropies: (B, T) in nats, with gradient.
        mask: (B, T) bool, True where a token counts.
        gather: Collects a tensor over ranks.
        step: Number of the optimizer step.
        state: Coefficient, last entropy, and the sums of the running step.
        target: The entropy to hold, in nats per token.
        delta: Step of α.
        start: α at the start.
        low: Least α.
        high: Largest α.

    Returns:
        (B, T) and the new state.

    References:
        He et al., Skywork-OR1, https://arxiv.org/abs/2505.22312, section 4; TRL's ``use_adaptive_entropy``.

    Example:
        >>> state = {"step": 0, "sum": 0.1, "tokens": 1.0}
        >>> term, state = adaptive_entropy(torch.tensor([[0.5]]), torch.ones(1, 1), lambda x: x, 1, state, start=0.1)
        >>> term, round(state["coef"], 3)
        (tensor([[-0.0525]]), 0.105)
    """
    coef, entropy = state.get("coef", start), state.get("entropy", float("inf"))
    total, tokens = state.get("sum", 0.0), state.get("tokens", 0.0)
    if step != state.get("step", step):  # a step has ended: measure it, move the coefficient, start anew
        entropy = total / max(tokens, 1.0)
        coef = min(coef + delta, high) if entropy <= target else max(coef - delta, low)
        total, tokens = 0.0, 0.0
    part = torch.stack([masked_sum(entropies.detach(), mask), mask.sum()])
    sums = gather(part[None]).sum(0).tolist()
    new = {"coef": coef, "entropy": entropy, "step": step, "sum": total + sums[0], "tokens": tokens + sums[1]}
    return -(coef if entropy <= target else 0.0) * entropies, new


@component(
    paper="https://arxiv.org/abs/1707.06347",
    formula=r"\tfrac{1}{2} \max\left( (V - R)^2, (\mathrm{clip}(V, V_{\text{old}} \pm {clip}) - R)^2 \right)",
    check=lambda p: p.clip is None or p.clip > 0 or "clip must be above 0, or null for no clipping",
)
def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, scored: Tensor | None = None, *, clip: float | None = 0.2
) -> Tensor:
    """The critic's regression to its targets, clipped around its old values.

    ½ max((V - R)², (clip(V, V_old - c, V_old + c) - R)²): pessimistic, as the policy's clip is.

    Args:
        values: (B, T) of the critic now, in reward units, with gradient.
        old_values: (B, T) of the critic at the rollout.
        returns: (B, T) targets R.
        scored: (B,) bool; a completion without any reward has no target, and 0 here.
        clip: The half-width c, in reward units; None for no clipping.

    Returns:
        (B, T).

    References:
        Baselines' PPO2; Huang et al., The 37 Implementation Details of PPO, detail 9. The paper itself
        (https://arxiv.org/abs/1707.06347, equation 9) has the plain square.

    Example:
        >>> value_loss(torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[2.0]]))
        tensor([[1.6200]])
    """
    plain, near = _value_errors(values, old_values, returns, clip)
    loss = torch.maximum(plain, near) / 2
    return loss if scored is None else select(loss, scored[:, None].expand_as(loss))


def value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """Where the clip of `value_loss` takes the gradient away.

    Args:
        values: (B, T) of the critic now.
        old_values: (B, T) of the critic at the rollout.
        returns: (B, T) targets.
        clip: The half-width; None for no clipping.

    Returns:
        (B, T) bool.

    Example:
        >>> value_clipped(torch.tensor([[1.0, 0.1]]), torch.zeros(1, 2), torch.tensor([[2.0, 2.0]]), clip=0.2)
        tensor([[ True, False]])
    """
    plain, near = _value_errors(values, old_values, returns, clip)
    return near > plain


def _value_errors(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """The squared error of the value, and that of the value clipped."""
    plain = (values - returns).square()
    if clip is None:
        return plain, plain
    return plain, (values.clamp(old_values - clip, old_values + clip) - returns).square()
