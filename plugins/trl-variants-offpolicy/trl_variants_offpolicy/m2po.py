r"""M2PO (Zheng et al. 2025): let stale data teach, and mask only the few tokens that carry the variance.

    L = 1/Σ|oᵢ| Σᵢ Σₜ -Mᵢₜ rᵢₜ Âᵢ,   r = π_θ / π_sampler
    M masks, largest (log r)² first, until the mean of (log r)² over what is left is at most τ = 0.04;
    only tokens that PPO could clip are counted and masked: Â > 0 and r > 1, or Â < 0 and r < 1

PPO's clip judges each token by itself, and on stale data cuts the rare tokens that matter most. No other correction
and no KL; otherwise GRPO with DAPO's mean over tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trl_variants import ClipResult, Variant, bounded_exp, component, select
from trl_variants_offpolicy.behaviour import behaviour

__all__ = ["M2PO", "m2po", "second_moment_mask"]

_PAPER = "https://arxiv.org/abs/2510.01161"


def _positive(p: object) -> bool | str:
    threshold = p.threshold  # type: ignore[attr-defined]
    return threshold > 0 or f"threshold ({threshold}) must be above 0"


def _outliers(squares: Tensor, counted: Tensor, threshold: float, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Which counted values must go, largest first, for the mean of the rest to be at most ``threshold``.

    Equal values stay or go together, so that the order of rows decides nothing.
    """
    ascending = gather(squares[counted]).sort().values
    # The mean of the n least grows with n.
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    kept = int((means <= threshold).sum())
    if kept == len(ascending):
        return torch.zeros_like(counted)
    return counted & (squares >= ascending[kept])


@component(
    paper=_PAPER,
    formula=r"-M_{i,t} \frac{\pi_\theta(o_{i,t})}{\pi_{\text{sampler}}(o_{i,t})} \hat A_{i,t}, \quad "
    r"M_{i,t} \text{ masks the largest } \log^2(\pi_\theta / \pi_{\text{sampler}}) "
    r"\text{ until their mean is at most } {threshold}",
    check=_positive,
    batch_statistic=True,
)
def m2po(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    gather: Callable[[Tensor], Tensor],
    sampling_log_probs: Tensor | None = None,
    *,
    threshold: float = 0.04,
) -> ClipResult:
    """Bound the second moment of the log-ratios: loss = -M r A, r = π_θ / π_sampler.

    r is of the current policy over the one that drew the tokens. Counted are the tokens that PPO could clip: A > 0
    and r > 1, or A < 0 and r < 1. M masks those with the largest (log r)² until the mean of the rest is at most τ;
    every other token is trained on with its full ratio. That is the paper's algorithm 1, as in ms-swift. The authors'
    code clips instead, at the bound that brings the mean of the clipped squares down to τ; AReaL's rule is
    `second_moment_mask`. Where there are no engine's log-probs, the old policy's stand in: then nothing is masked at
    the first update on a rollout.

    The mean is over the micro-batch on all ranks, so the cut into micro-batches changes it.

    Args:
        log_probs: (B, T) of the current policy, in nats.
        old_log_probs: (B, T) of the trainer's policy at the rollout; read where the engine gives nothing.
        advantages: (B, T) or (B, 1).
        mask: (B, T) bool, True where a token counts.
        gather: Collects a tensor over ranks.
        sampling_log_probs: (B, T) of the engine. NaN where it could not score a token.
        threshold: τ, in squared nats.

    Returns:
        Loss (B, T), and which tokens were masked: low where A < 0, high where A > 0.

    References:
        Zheng et al., Prosperity before Collapse, https://arxiv.org/abs/2510.01161, algorithm 1.

    Example:
        >>> now = torch.tensor([[0.1, 0.2, 0.4]])  # squares .01, .04, .16
        >>> m2po(now, torch.zeros(1, 3), torch.ones(1, 1), torch.ones(1, 3), lambda x: x).high
        tensor([[False, False,  True]])
    """
    log_ratio = log_probs - behaviour(old_log_probs, sampling_log_probs)
    fixed = select(log_ratio.detach(), mask).clamp(-20, 20)
    counted = fixed * advantages > 0  # nowhere that the mask is False: there it is 0
    masked = _outliers(fixed.square(), counted, threshold, gather)
    loss = select(-bounded_exp(log_ratio) * advantages, ~masked)
    return ClipResult(loss=loss, low=masked & (advantages < 0), high=masked & (advantages > 0))


@component(
    paper=_PAPER,
    formula=r"M_{i,t}, \quad M_{i,t} \text{ masks the largest } \log^2(\pi_{\text{old}} / \pi_{\text{sampler}}) "
    r"\text{ until their mean is at most } {threshold}",
    check=_positive,
    batch_statistic=True,
)
def second_moment_mask(
    old_log_probs: Tensor,
    mask: Tensor,
    gather: Callable[[Tensor], Tensor],
    sampling_log_probs: Tensor | None = None,
    *,
    threshold: float = 0.04,
) -> Tensor | None:
    """AReaL's M2PO, beside any clip rule: mask tokens until the mean of (log π_old - log π_sampler)² is at most τ.

    It compares the proximal policy (the trainer's at the rollout) and the behaviour policy, never the current one, and
    counts every token. AReaL keeps the last token whatever its square; here, as in the paper, nothing need be left.
    What is masked stays in the denominator.

    Args:
        old_log_probs: (B, T) of the trainer's policy at the rollout, in nats.
        mask: (B, T) bool, True where a token counts.
        gather: Collects a tensor over ranks.
        sampling_log_probs: (B, T) of the engine. NaN where it could not score a token: its difference is taken as 0.
        threshold: τ, in squared nats; AReaL's ``m2_threshold``.

    Returns:
        (B, T), 1 or 0; None, for 1, where the engine returns no log-probs.

    References:
        Zheng et al., Prosperity before Collapse, https://arxiv.org/abs/2510.01161; AReaL's actor.

    Example:
        >>> old, engine = torch.zeros(1, 3), torch.tensor([[0.1, 0.2, -0.4]])
        >>> second_moment_mask(old, torch.ones(1, 3), lambda x: x, engine)
        tensor([[1., 1., 0.]])
    """
    if sampling_log_probs is None:
        return None
    difference = old_log_probs.detach() - behaviour(old_log_probs, sampling_log_probs)
    squares = select(difference, mask).clamp(-20, 20).square()
    return (~_outliers(squares, mask.bool(), threshold, gather)).to(old_log_probs.dtype)


M2PO = Variant(
    name="m2po",
    extends="grpo",
    paper=_PAPER,
    summary="Not each token's ratio is bounded but the second moment of all: few tokens are masked, stale data serve.",
    importance_ratio="none",
    clip_rule="m2po",
    token_weight="none",
    loss_aggregator="token_mean",
    kl=None,
)
