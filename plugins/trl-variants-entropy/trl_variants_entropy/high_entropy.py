r"""Forking tokens (Wang et al. 2025, Beyond the 80/20 Rule): train on the tokens of high entropy alone.

    L = 1/Σ|oᵢ| Σᵢ Σₜ 𝟙[Hᵢₜ ≥ τ] · -min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1-0.2, 1+0.28) Âᵢ),   τ: the 0.8-quantile of H

A minority of tokens decides where a chain of thought goes; the rest follows. The fifth of the tokens with the highest
entropy gets the policy gradient, and the others still count in the denominator. All else is DAPO.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trl_variants import Variant, component, use

__all__ = ["FORKING_TOKENS", "high_entropy_mask"]

_PAPER = "https://arxiv.org/abs/2506.01939"


@component(
    paper=_PAPER,
    formula=r"\mathbb{1}[H_{i,t} \ge \tau], \quad "
    r"\tau: \text{ the share } {top_entropy_quantile} \text{ of all tokens has } H_{i,t} \ge \tau",
    check=lambda p: (
        0 <= p.top_entropy_quantile <= 1
        or f"top_entropy_quantile ({p.top_entropy_quantile}) is a share of the tokens, so between 0 and 1"
    ),
    batch_statistic=True,
)
def high_entropy_mask(
    entropies: Tensor, mask: Tensor, gather: Callable[[Tensor], Tensor], *, top_entropy_quantile: float = 0.2
) -> Tensor:
    """Keep the tokens of high entropy: w = 1 where H ≥ τ, else 0; τ is the (1 - q)-quantile of H.

    The quantile is over the tokens of a micro-batch on all ranks, as in TRL; ms-swift takes it on each rank alone. It
    is interpolated linearly between tokens. What has the weight 0 stays in the aggregator's denominator, and KL in the
    loss is left on every token. TRL lets its entropy bonus act on the kept tokens only; here a regularizer acts on all.

    Args:
        entropies: (B, T) of the next-token distribution, in nats.
        mask: (B, T) bool, True where a token counts.
        gather: Collects a tensor over ranks.
        top_entropy_quantile: q, the share that is kept, TRL's name for the paper's ρ. 0 keeps the one highest, 1 all.

    Returns:
        (B, T), 1 or 0.

    References:
        Wang et al., Beyond the 80/20 Rule, https://arxiv.org/abs/2506.01939, section 5; TRL's
        ``top_entropy_quantile``, whose default of 1 keeps all.

    Example:
        >>> entropies = torch.tensor([[0.1, 2.0, 0.3, 0.2, 0.5, 0.4]])
        >>> high_entropy_mask(entropies, torch.ones(1, 6), lambda x: x)
        tensor([[0., 1., 0., 0., 1., 0.]])
    """
    entropies, counted = entropies.detach(), mask.bool()
    ascending = gather(entropies[counted]).sort().values
    if not len(ascending):
        return torch.zeros_like(entropies)
    # As torch.quantile, step by step, which refuses more than 16 million values.
    last = len(ascending) - 1
    place = (ascending.new_tensor(1 - top_entropy_quantile) * last).clamp(max=last)
    below, above = ascending[place.long()], ascending[place.ceil().long()]
    threshold = torch.lerp(below, above, place - place.floor())
    return (counted & (entropies >= threshold)).to(entropies.dtype)


FORKING_TOKENS = Variant(
    name="forking_tokens",
    extends="dapo",
    paper=_PAPER,
    summary="DAPO on the fifth of the tokens that has the highest entropy.",
    token_weight=["rollout_correction", use("high_entropy_mask", top_entropy_quantile=0.2)],
)
