"""Clip rules: the surrogate loss of each token, and where it takes the gradient away.

With ρ the importance ratio and A the advantage; on-policy (ρ = 1) each one's gradient with respect to log π is -A. A
clip fraction counts binding clips only: tokens where the bound changed the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_variants.components.masked import bounded_exp
from trl_variants.data import ClipResult
from trl_variants.declaration import component

__all__ = ["cispo", "dual_clip", "policy_gradient", "ppo_clip"]


def _clip_range(p: object) -> bool | str:
    low, high = p.epsilon_low, p.epsilon_high  # type: ignore[attr-defined]
    if not 0 <= low < 1:
        return f"epsilon_low ({low}) must be at least 0 and below 1"
    return high >= 0 or f"epsilon_high ({high}) must not be negative"


@component(
    paper="https://doi.org/10.1007/BF00992696",
    formula=r"-\hat A_{i,t} \log \pi_\theta(o_{i,t})",
)
def policy_gradient(log_probs: Tensor, advantages: Tensor) -> ClipResult:
    """The plain policy gradient: loss = -A log π. Nothing is clipped, and no ratio is read.

    Args:
        log_probs: (B, T) of the current policy, in nats.
        advantages: (B, T) or (B, 1).

    Returns:
        Loss (B, T).

    References:
        Williams 1992; documents 001 and 002, section 3.1.

    Example:
        >>> policy_gradient(torch.tensor([[-2.0]]), torch.tensor([[3.0]])).loss
        tensor([[6.]])
    """
    return ClipResult(loss=-advantages * log_probs)


@component(
    paper="https://arxiv.org/abs/1707.06347",
    formula=r"-\min\left( \rho_{i,t} \hat A_{i,t},\; "
    r"\mathrm{clip}(\rho_{i,t}, 1 - {epsilon_low}, 1 + {epsilon_high})\, \hat A_{i,t} \right)",
    check=_clip_range,
)
def ppo_clip(
    log_ratio: Tensor, advantages: Tensor, *, epsilon_low: float = 0.2, epsilon_high: float = 0.2
) -> ClipResult:
    """PPO's clipped surrogate: loss = -min(ρA, clip(ρ, 1-ε_low, 1+ε_high) A).

    It removes an incentive, it is not a projection: past the bound in the direction that A wants, the gradient is
    zero; on the other side it stays, and pulls ρ back (document 001).

    Args:
        log_ratio: (B, T) or (B, 1), log ρ; bounded to +-20 before exp.
        advantages: (B, T) or (B, 1).
        epsilon_low: How far below 1 the ratio is rewarded for going.
        epsilon_high: How far above. DAPO's clip-higher is 0.28.

    Returns:
        Loss of the inputs' joint shape, and which tokens were clipped low and high.

    References:
        Schulman et al., PPO, https://arxiv.org/abs/1707.06347, equation 7; Yu et al., DAPO,
        https://arxiv.org/abs/2503.14476, equation 10, for two bounds.

    Example:
        >>> log_ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log()
        >>> ppo_clip(log_ratio, torch.tensor([[1.0, -1.0, 1.0, -1.0]])).loss
        tensor([[-1.2000,  1.5000, -0.5000,  0.8000]])
    """
    ratio = bounded_exp(log_ratio)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return ClipResult(
        loss=-torch.min(ratio * advantages, clipped * advantages),
        low=(ratio < 1 - epsilon_low) & (advantages < 0),
        high=(ratio > 1 + epsilon_high) & (advantages > 0),
    )


@component(
    paper="https://arxiv.org/abs/1912.09729",
    formula=r"-\max\left( \min\left( \rho_{i,t} \hat A_{i,t},\; "
    r"\mathrm{clip}(\rho_{i,t}, 1 - {epsilon_low}, 1 + {epsilon_high})\, \hat A_{i,t} \right),\; "
    r"{c}\, \hat A_{i,t} \right) \text{ where } \hat A_{i,t} < 0",
    check=lambda p: (
        _clip_range(p)
        if _clip_range(p) is not True
        else p.c > 1 + p.epsilon_high or f"c ({p.c}) must be above 1 + epsilon_high ({1 + p.epsilon_high})"
    ),
)
def dual_clip(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    c: float = 3.0,
) -> ClipResult:
    """PPO's surrogate with a second bound for negative advantages: where A < 0, loss = min(loss of ppo_clip, c |A|).

    Without it a token with A < 0 whose ratio has grown large has an unbounded loss and gradient. Document 003 writes
    max(min(ρA, clip(ρ)A), (1-ε)A) instead; with A < 0 that is (1-ε)A wherever ρ > 1-ε, so it takes the gradient from
    every negative advantage. The paper's form is the one here.

    Args:
        log_ratio: (B, T) or (B, 1), log ρ; bounded to +-20 before exp.
        advantages: (B, T) or (B, 1).
        epsilon_low: How far below 1 the ratio is rewarded for going.
        epsilon_high: How far above.
        c: The second bound on ρ, above 1 + ε_high.

    Returns:
        Loss, and which tokens were clipped low, high, and by c.

    References:
        Ye et al., Mastering Complex Control in MOBA Games, https://arxiv.org/abs/1912.09729.

    Example:
        >>> dual_clip(torch.tensor([[10.0, 2.0]]).log(), torch.tensor([[-1.0, -1.0]])).loss
        tensor([[3., 2.]])
    """
    single = ppo_clip(log_ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    bound = torch.where(advantages < 0, -c * advantages, torch.inf)
    return ClipResult(
        loss=torch.min(single.loss, bound), low=single.low, high=single.high, dual=single.loss.detach() > bound
    )


@component(
    paper="https://arxiv.org/abs/2506.13585",
    formula=r"-\mathrm{sg}[\min(\rho_{i,t}, {epsilon_max})]\, \hat A_{i,t} \log \pi_\theta(o_{i,t})",
    check=lambda p: p.epsilon_max > 1 or f"epsilon_max ({p.epsilon_max}) is a cap on the ratio itself, so above 1",
)
def cispo(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, epsilon_max: float = 5.0) -> ClipResult:
    """Cap the importance weight, keep the gradient: loss = -sg[min(ρ, ε_max)] A log π.

    A capped token still learns, with the weight ε_max. There is no lower bound.

    Args:
        log_ratio: (B, T) or (B, 1), log ρ; bounded to +-20 before exp.
        log_probs: (B, T) of the current policy, in nats.
        advantages: (B, T) or (B, 1).
        epsilon_max: Cap on ρ itself, above 1. TRL's default of 0.2 would scale the gradient to a fifth.

    Returns:
        Loss (B, T), and which tokens were capped.

    References:
        MiniMax-M1, https://arxiv.org/abs/2506.13585, equation 4; ScaleRL, https://arxiv.org/abs/2510.13786, for 5.

    Example:
        >>> cispo(torch.tensor([[10.0]]).log(), torch.tensor([[-1.0]]), torch.tensor([[1.0]])).loss
        tensor([[5.]])
    """
    ratio = bounded_exp(log_ratio).detach()
    high = ((ratio > epsilon_max) & (advantages != 0)).expand_as(log_probs)
    return ClipResult(loss=-ratio.clamp(max=epsilon_max) * advantages * log_probs, high=high)
