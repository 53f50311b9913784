r"""DPPO (Qi et al. 2026): a trust region in probability, where PPO's is one of ratios.

    L = 1/Σ|oᵢ| Σᵢ Σₜ -Mᵢₜ sg[min(rᵢₜ, 20)] Âᵢ log π_θ(oᵢₜ),   r = π_θ / π_sampler
    M = 0 where D > δ and the token is on its way out: Â > 0 and r > 1, or Â < 0 and r < 1

    dppo_tv   D = |π_θ - π_sampler|, δ = 0.15
    dppo_kl   D = KL of two coins, π_sampler and π_θ of the token against the rest, δ = 0.05

A ratio of 2 is nothing on a token of probability 1e-4 and everything on one of 0.4; PPO treats both alike. Both the
ratio and D compare with the policy that drew the tokens, so no other correction is made. No KL; otherwise GRPO with
DAPO's mean over tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_variants import ClipResult, Variant, bounded_exp, component, select
from trl_variants_offpolicy.behaviour import behaviour

__all__ = ["VARIANTS", "dppo_kl", "dppo_tv"]

_PAPER = "https://arxiv.org/abs/2602.04879"
_LOSS = (
    r"-M_{i,t}\, \mathrm{sg}\left[ \min\left( \frac{\pi_\theta(o_{i,t})}{\pi_{\text{sampler}}(o_{i,t})}, "
    r"{ratio_max} \right) \right] \hat A_{i,t} \log \pi_\theta(o_{i,t}), \quad "
    r"M_{i,t} = 0 \text{ where } \hat A_{i,t} > 0, \pi_\theta > \pi_{\text{sampler}}, D_{i,t} > {delta_high} "
    r"\text{ or } \hat A_{i,t} < 0, \pi_\theta < \pi_{\text{sampler}}, D_{i,t} > {delta_low}, \quad "
)


def _ranges(p: object) -> bool | str:
    for name in ("delta_low", "delta_high"):
        if getattr(p, name) <= 0:
            return f"{name} ({getattr(p, name)}) must be above 0"
    cap = p.ratio_max  # type: ignore[attr-defined]
    return cap is None or cap > 1 or f"ratio_max ({cap}) is a cap on the ratio itself, so above 1"


def _within_one(p: object) -> bool | str:
    for name in ("delta_low", "delta_high"):
        if getattr(p, name) >= 1:
            return f"{name} ({getattr(p, name)}) is a difference of probabilities, so below 1"
    return _ranges(p)


def _trusted(
    log_probs: Tensor,
    drawn_by: Tensor,
    advantages: Tensor,
    divergence: Tensor,
    delta_low: float,
    delta_high: float,
    ratio_max: float | None,
) -> ClipResult:
    """The loss of the tokens inside the trust region, or on their way back into it."""
    log_ratio = log_probs.detach() - drawn_by
    low = (advantages < 0) & (log_ratio < 0) & (divergence > delta_low)
    high = (advantages > 0) & (log_ratio > 0) & (divergence > delta_high)
    ratio = bounded_exp(log_ratio).clamp(max=torch.inf if ratio_max is None else ratio_max)
    loss = -ratio * advantages * log_probs
    return ClipResult(loss=select(loss, ~(low | high)), low=low, high=high)


@component(
    paper=_PAPER,
    formula=_LOSS + r"D_{i,t} = |\pi_\theta(o_{i,t}) - \pi_{\text{sampler}}(o_{i,t})|",
    check=_within_one,
)
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sampling_log_probs: Tensor | None = None,
    *,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    ratio_max: float | None = 20.0,
) -> ClipResult:
    """Mask by the total variation of two coins, the sampled token or another: D = |π_θ(oₜ) - π_sampler(oₜ)|.

    loss = -M sg[min(r, ratio_max)] A log π_θ with r = π_θ / π_sampler, the current policy over the one that drew the
    token. M is 0 where D is above δ and the update would carry the token further out: A > 0 and r > 1 (δ_high), or
    A < 0 and r < 1 (δ_low). On its way back a token always learns. A token with A = 0 has no loss, and counts as kept
    (SkyRL; verl judges it as one with A < 0). Where there are no engine's log-probs, the old policy's stand in.

    Args:
        log_probs: (B, T) of the current policy, in nats.
        old_log_probs: (B, T) of the trainer's policy at the rollout; read where the engine gives nothing.
        advantages: (B, T) or (B, 1).
        sampling_log_probs: (B, T) of the engine. NaN where it could not score a token.
        delta_low: Largest loss of probability that is trained on where A < 0. The paper and TRL 0.15; SkyRL and
            prime-rl 0.2.
        delta_high: Largest gain of probability that is trained on where A > 0.
        ratio_max: Cap on r, or None (SkyRL: e^20). The authors' code and TRL 20; verl's configuration makes it 3.

    Returns:
        Loss (B, T), and which tokens were masked low and high.

    References:
        Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning, https://arxiv.org/abs/2602.04879.

    Example:
        >>> now, drawn = torch.tensor([[0.9, 0.9, 0.002]]).log(), torch.tensor([[0.5, 0.5, 0.001]]).log()
        >>> dppo_tv(now, drawn, torch.tensor([[1.0, -1.0, 1.0]])).high
        tensor([[ True, False, False]])
    """
    drawn_by = behaviour(old_log_probs, sampling_log_probs)
    divergence = (_probability(log_probs) - _probability(drawn_by)).abs()
    return _trusted(log_probs, drawn_by, advantages, divergence, delta_low, delta_high, ratio_max)


@component(
    paper=_PAPER,
    formula=_LOSS + r"D_{i,t} = \pi_{\text{sampler}} \log \frac{\pi_{\text{sampler}}}{\pi_\theta} + "
    r"(1 - \pi_{\text{sampler}}) \log \frac{1 - \pi_{\text{sampler}}}{1 - \pi_\theta}",
    check=_ranges,
)
def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sampling_log_probs: Tensor | None = None,
    *,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    ratio_max: float | None = 20.0,
) -> ClipResult:
    """Mask by the KL of two coins, the sampled token or another: D = μ log(μ/π) + (1-μ) log((1-μ)/(1-π)).

    μ = π_sampler(oₜ), π = π_θ(oₜ); otherwise `dppo_tv`. D is a lower bound of KL(π_sampler ‖ π_θ) over the whole
    vocabulary. 1 - π is held above 1e-8.

    Args:
        log_probs: (B, T) of the current policy, in nats.
        old_log_probs: (B, T) of the trainer's policy at the rollout; read where the engine gives nothing.
        advantages: (B, T) or (B, 1).
        sampling_log_probs: (B, T) of the engine. NaN where it could not score a token.
        delta_low: Largest D, in nats, that is trained on where A < 0 and r < 1. The paper 0.05; verl takes its
            clip_ratio, 0.2.
        delta_high: Largest D, in nats, that is trained on where A > 0 and r > 1.
        ratio_max: Cap on r, or None.

    Returns:
        Loss (B, T), and which tokens were masked low and high.

    References:
        Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning, https://arxiv.org/abs/2602.04879.

    Example:
        >>> now, drawn = torch.tensor([[0.9, 0.9, 0.002]]).log(), torch.tensor([[0.5, 0.5, 0.001]]).log()
        >>> dppo_kl(now, drawn, torch.tensor([[1.0, -1.0, 1.0]])).high  # D = .51, .51, .0003
        tensor([[ True, False, False]])
    """
    drawn_by = behaviour(old_log_probs, sampling_log_probs)
    now, then = log_probs.detach().clamp(max=0), drawn_by.clamp(max=0)
    rest_now, rest_then = _rest(now), _rest(then)
    divergence = then.exp() * (then - now) + rest_then * (rest_then / rest_now).log()
    return _trusted(log_probs, drawn_by, advantages, divergence, delta_low, delta_high, ratio_max)


def _probability(log_probs: Tensor) -> Tensor:
    """π, at most 1 whatever rounding did."""
    return log_probs.detach().clamp(max=0).exp()


def _rest(log_probs: Tensor) -> Tensor:
    """1 - π, exact where π is near 1, and never 0."""
    return -torch.expm1(log_probs).clamp(max=-1e-8)


VARIANTS = [
    Variant(
        name="dppo_tv",
        extends="grpo",
        paper=_PAPER,
        summary="Tokens whose probability has moved too far are masked, not those whose ratio has.",
        importance_ratio="none",
        clip_rule="dppo_tv",
        token_weight="none",
        loss_aggregator="token_mean",
        kl=None,
    ),
    Variant(
        name="dppo_kl",
        extends="dppo_tv",
        paper=_PAPER,
        summary="DPPO with the KL of token against rest for a measure.",
        clip_rule="dppo_kl",
    ),
]
