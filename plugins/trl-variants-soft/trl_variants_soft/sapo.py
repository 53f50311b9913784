r"""SAPO (Gao et al. 2025): a gate that closes smoothly as a token leaves the old policy, instead of a clip.

    L = 1/N Σᵢ 1/|oᵢ| Σₜ -f(ρᵢₜ) Âᵢ,   f(ρ) = 4/τ σ(τ (ρ - 1)),   τ = 1 where Âᵢ > 0, else 1.05

The gradient's weight f'(ρ) = 4 p (1 - p) with p = σ(τ (ρ - 1)) is 1 on-policy and falls on both sides; a token that
strayed is damped alone, where GSPO drops its completion. Pushing down raises the many other tokens, so that the gate
for negative advantages closes sooner. No clip and no KL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_variants import ClipResult, Variant, bounded_exp, component, use

__all__ = ["SAPO", "sapo"]


@component(
    paper="https://arxiv.org/abs/2511.20347",
    formula=r"-\frac{4}{\tau}\, \sigma(\tau (\rho_{i,t} - 1))\, \hat A_{i,t}, \quad "
    r"\tau = {tau_pos} \text{ where } \hat A_{i,t} > 0, \text{ else } {tau_neg}",
    check=lambda p: (p.tau_pos > 0 and p.tau_neg > 0) or "tau_pos and tau_neg must be above 0",
)
def sapo(log_ratio: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> ClipResult:
    """A soft gate on the ratio: loss = -4/τ σ(τ (ρ - 1)) A.

    τ is ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere; at A = 0 loss and gradient are 0 with either. Nothing is
    cut, so that nothing is reported as clipped.

    Args:
        log_ratio: (B, T) or (B, 1), log ρ; bounded to +-20 before exp.
        advantages: (B, T) or (B, 1).
        tau_pos: How fast the gate closes where A > 0. TRL's ``sapo_temperature_pos``; verl, SkyRL and AReaL as here.
        tau_neg: The same where A <= 0. The paper's is larger than ``tau_pos``, for stability.

    Returns:
        Loss of the inputs' joint shape.

    References:
        Gao et al., Soft Adaptive Policy Optimization, https://arxiv.org/abs/2511.20347.

    Example:
        >>> ratio = torch.tensor([[1.0, 2.0]])  # 4 sigmoid(0), 4 sigmoid(1)
        >>> sapo(ratio.log(), torch.tensor([[1.0]])).loss
        tensor([[-2.0000, -2.9242]])
    """
    tau = torch.where(advantages > 0, log_ratio.new_full((), tau_pos), log_ratio.new_full((), tau_neg))
    return ClipResult(loss=-4 / tau * torch.sigmoid(tau * (bounded_exp(log_ratio) - 1)) * advantages)


SAPO = Variant(
    name="sapo",
    extends="grpo",
    paper="https://arxiv.org/abs/2511.20347",
    summary="A smooth gate on each token's ratio instead of a clip; no KL.",
    clip_rule=use("sapo", tau_pos=1.0, tau_neg=1.05),
    kl=None,
)
