r"""Clip-Cov and KL-Cov (Cui et al. 2025, The Entropy Mechanism): act on the tokens whose covariance is large.

    Covᵢₜ = (log π_θ(oᵢₜ) - mean log π_θ) (Âᵢₜ - mean Â)
    L     = 1/Σ|oᵢ| Σᵢ Σₜ -ρᵢₜ Âᵢ, but
    Clip-Cov: 0 for a random 2e-4 of the tokens, among those with 1 ≤ Cov ≤ 5
    KL-Cov:   -ρᵢₜ Âᵢ + β KL(π_old, π_θ) for the 2e-4 of the tokens with the largest Cov

A step of policy gradient changes the entropy by minus this covariance: likely tokens of high advantage use it up. A
few tokens hold most of it. Otherwise DAPO without its penalty on length and without its clip of the ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from trl_variants import ClipResult, Variant, bounded_exp, component, masked_sum, select, use
from trl_variants_entropy.choice import Gather, least, quota, token_keys

__all__ = ["CLIP_COV", "KL_COV", "clip_cov", "covariances", "kl_cov"]

_PAPER = "https://arxiv.org/abs/2505.22617"
_COVARIANCE = (
    r", \quad \mathrm{Cov}_{i,t} = (\log \pi_\theta(o_{i,t}) - \mathrm{mean} \log \pi_\theta)"
    r"(\hat A_{i,t} - \mathrm{mean}\, \hat A)"
)


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor, gather: Gather) -> tuple[Tensor, int]:
    """Each token's part of the covariance of log-prob and advantage, over the tokens of all ranks.

    Args:
        log_probs: (B, T), in nats.
        advantages: (B, T) or (B, 1).
        mask: (B, T) bool, True where a token counts.
        gather: Collects a tensor over ranks.

    Returns:
        (B, T), without gradient, 0 where masked; and the number of tokens on all ranks.

    Example:
        >>> log_probs, advantages = torch.tensor([[-1.0, -4.0], [-2.0, -1.0]]), torch.tensor([[2.0], [-2.0]])
        >>> covariances(log_probs, advantages, torch.ones(2, 2), lambda x: x)[0]
        tensor([[ 2., -4.],
                [-0., -2.]])
    """
    log_probs, advantages = log_probs.detach(), advantages.detach().expand_as(log_probs)
    sums = [masked_sum(log_probs, mask), masked_sum(advantages, mask), mask.sum().to(log_probs.dtype)]
    totals = gather(torch.stack(sums)[None]).sum(0)
    mean_log_prob, mean_advantage = totals[:2] / totals[2].clamp(min=1)
    return select((log_probs - mean_log_prob) * (advantages - mean_advantage), mask), int(totals[2])


def _share(name: str, p: object) -> bool | str:
    share, number = getattr(p, name), p.at_least  # type: ignore[attr-defined]
    if not 0 < share <= 1:
        return f"{name} ({share}) is a share of the tokens, so above 0 and at most 1"
    return number >= 0 or f"at_least ({number}) must not be negative"


def _clip_cov_range(p: object) -> bool | str:
    low, high = p.epsilon_low, p.epsilon_high  # type: ignore[attr-defined]
    lb, ub = p.clip_cov_lb, p.clip_cov_ub  # type: ignore[attr-defined]
    if lb >= ub:
        return f"clip_cov_lb ({lb}) must be below clip_cov_ub ({ub})"
    if not 0 <= low <= 1:
        return f"epsilon_low ({low}) must be at least 0 and at most 1"
    if high < 0:
        return f"epsilon_high ({high}) must not be negative"
    return _share("clip_cov_ratio", p)


@component(
    paper=_PAPER,
    formula=r"-\min\left( \rho_{i,t} \hat A_{i,t},\; "
    r"\mathrm{clip}(\rho_{i,t}, 1 - {epsilon_low}, 1 + {epsilon_high})\, \hat A_{i,t} \right), \quad "
    r"\text{but 0 for a random share } {clip_cov_ratio} \text{ of all tokens, among those with } "
    r"{clip_cov_lb} \le \mathrm{Cov}_{i,t} \le {clip_cov_ub}" + _COVARIANCE,
    check=_clip_cov_range,
    batch_statistic=True,
)
def clip_cov(
    log_ratio: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    gather: Callable[[Tensor], Tensor],
    step: int,
    *,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    at_least: int = 1,
    epsilon_low: float = 1.0,
    epsilon_high: float = 1.0,
) -> ClipResult:
    """Take the gradient from a random few of the tokens whose covariance is large: loss 0 there, else as `ppo_clip`.

    Cov = (log π - mean log π)(A - mean A). Of the tokens with lb ≤ Cov ≤ ub that the ratio's clip leaves alone, as many
    as the share r of *all* tokens are drawn. The draw is a hash of the optimizer step and of what each token is (its
    position, log-prob, advantage and completion's length), so it is the same on every run, in every order of rows and
    however ranks divide them.

    Means and shares are over the tokens of a micro-batch on all ranks; verl and SkyRL take them over the valid tokens
    of one rank's micro-batch. The chosen tokens stay in the aggregator's denominator, as there.

    Args:
        log_ratio: (B, T) or (B, 1), log ρ; bounded to +-20 before exp.
        log_probs: (B, T) of the current policy, in nats.
        advantages: (B, T) or (B, 1).
        mask: (B, T) bool, True where a token counts.
        gather: Collects a tensor over ranks.
        step: Number of the optimizer step; another one draws other tokens.
        clip_cov_ratio: r, the share of all tokens; SkyRL's ``clip_ratio``.
        clip_cov_lb: Least covariance of a token that may be drawn, ω_low; far above the mean.
        clip_cov_ub: Largest one, ω_high.
        at_least: Least number drawn from a micro-batch that has candidates: 1 in verl and SkyRL, 0 in the paper. With
            1, small micro-batches lose a larger share than r.
        epsilon_low: The ratio's clip below 1; 1 is none. The authors' runs have 1, verl and SkyRL 0.2 by default.
        epsilon_high: The ratio's clip above 1; as ``epsilon_low``. The paper's equation 12 has no clip of the ratio.

    Returns:
        Loss (B, T); which tokens the ratio's clip stopped, low and high; and as dual those that were drawn.

    References:
        Cui et al., The Entropy Mechanism, https://arxiv.org/abs/2505.22617, equations 10 to 12; verl's ``clip_cov``.

    Example:
        >>> now, advantages = torch.tensor([[-1.0, -3.0], [-2.0, -2.0]]), torch.tensor([[2.0], [-2.0]])
        >>> result = clip_cov(torch.zeros(2, 2), now, advantages, torch.ones(2, 2), lambda x: x, 0)
        >>> result.loss
        tensor([[ 0., -2.],
                [ 2.,  2.]])
    """
    ratio = bounded_exp(log_ratio)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.min(ratio * advantages, clipped * advantages).expand_as(log_probs)
    low = ((ratio < 1 - epsilon_low) & (advantages < 0)).expand_as(log_probs)
    high = ((ratio > 1 + epsilon_high) & (advantages > 0)).expand_as(log_probs)

    covariance, tokens = covariances(log_probs, advantages, mask, gather)
    among = (covariance >= clip_cov_lb) & (covariance <= clip_cov_ub) & mask.bool() & ~low & ~high
    keys = token_keys(log_probs, advantages, mask, step)
    drawn = least(keys, among, quota(tokens, clip_cov_ratio, at_least), gather)
    return ClipResult(loss=select(loss, ~drawn), low=low, high=high, dual=drawn)


@component(
    paper=_PAPER,
    formula=r"-\rho_{i,t} \hat A_{i,t}, \quad \text{and } + {ppo_kl_coef} \cdot "
    r"\mathrm{KL}_{i,t}(\pi_{\text{old}}, \pi_\theta) "
    r"\text{ (as {penalty}) for the share } {kl_cov_ratio} \text{ of tokens with the largest } \mathrm{Cov}_{i,t}"
    + _COVARIANCE,
    check=lambda p: (
        _share("kl_cov_ratio", p) if p.ppo_kl_coef > 0 else f"ppo_kl_coef ({p.ppo_kl_coef}) must be above 0"
    ),
    batch_statistic=True,
)
def kl_cov(
    log_ratio: Tensor,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    gather: Callable[[Tensor], Tensor],
    step: int,
    *,
    kl_cov_ratio: float = 2e-4,
    ppo_kl_coef: float = 1.0,
    penalty: Literal["abs", "k3"] = "abs",
    at_least: int = 1,
) -> ClipResult:
    """Hold the tokens with the largest covariance near the old policy: loss = -ρA, and there + β KL(π_old, π).

    Cov = (log π - mean log π)(A - mean A), over the tokens of a micro-batch on all ranks; verl and SkyRL take it over
    the valid tokens of one rank's micro-batch. Among equal covariances, as where all advantages are equal, tokens are
    drawn by a hash of the optimizer step and of what each is, as in `clip_cov`. Nothing is clipped: every token keeps
    its gradient. On the first optimizer step after a rollout ρ is 1 and the penalty has no gradient.

    Args:
        log_ratio: (B, T) or (B, 1), log ρ; bounded to +-20 before exp.
        log_probs: (B, T) of the current policy, in nats.
        old_log_probs: (B, T) of the policy at the rollout, in nats.
        advantages: (B, T) or (B, 1).
        mask: (B, T) bool, True where a token counts.
        gather: Collects a tensor over ranks.
        step: Number of the optimizer step.
        kl_cov_ratio: The share k of the tokens. The paper has 2e-3 for a model of 7B and 2e-4 for 32B, verl 2e-4, SkyRL
            0.2 (as ``kl_cov_frac``).
        ppo_kl_coef: β. The paper and SkyRL have 1, verl's config 0.1.
        penalty: ``abs``: |log π - log π_old|, as the authors' code, verl and SkyRL. ``k3``: ρ - 1 - log ρ, the estimate
            of the KL(π_old, π) that the paper's equation 14 writes.
        at_least: Least number of tokens in a micro-batch: 1 in verl and SkyRL, 0 in the paper.

    Returns:
        Loss (B, T).

    References:
        Cui et al., The Entropy Mechanism, https://arxiv.org/abs/2505.22617, equations 10, 13 and 14; verl's ``kl_cov``.

    Example:
        >>> now, advantages = torch.tensor([[-1.0, -3.0], [-2.0, -2.0]]), torch.tensor([[2.0], [-2.0]])
        >>> old = now - torch.tensor([[0.5, 0.0], [0.0, 0.0]])
        >>> kl_cov(now - old, now, old, advantages, torch.ones(2, 2), lambda x: x, 0).loss
        tensor([[-2.7974, -2.0000],
                [ 2.0000,  2.0000]])
    """
    loss = (-bounded_exp(log_ratio) * advantages).expand_as(log_probs)
    covariance, tokens = covariances(log_probs, advantages, mask, gather)
    keys = token_keys(log_probs, advantages, mask, step)
    held = _largest(covariance, keys, mask.bool(), quota(tokens, kl_cov_ratio, at_least), gather)
    apart = (log_probs - old_log_probs).clamp(-20, 20)
    kl = apart.abs() if penalty == "abs" else bounded_exp(apart) - 1 - apart
    return ClipResult(loss=loss + ppo_kl_coef * select(kl, held))


def _largest(covariance: Tensor, keys: Tensor, among: Tensor, number: int, gather: Gather) -> Tensor:
    """Where the ``number`` largest covariances are, among some tokens of all ranks; equal ones by the least keys."""
    found = gather(covariance[among]).sort(descending=True).values
    if not number:
        return torch.zeros_like(among)
    last = found[number - 1]
    equal = least(keys, among & (covariance == last), number - int((found > last).sum()), gather)
    return (among & (covariance > last)) | equal


CLIP_COV = Variant(
    name="clip_cov",
    extends="dapo",
    paper=_PAPER,
    summary="A few tokens whose log-prob and advantage vary together most lose their gradient; no clip of the ratio.",
    reward_shaper="none",
    clip_rule=use("clip_cov", clip_cov_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0),
)

KL_COV = Variant(
    name="kl_cov",
    extends="dapo",
    paper=_PAPER,
    summary="The few tokens whose log-prob and advantage vary together most are held near the old policy; no clip.",
    reward_shaper="none",
    clip_rule=use("kl_cov", kl_cov_ratio=2e-4, ppo_kl_coef=1.0),
)
