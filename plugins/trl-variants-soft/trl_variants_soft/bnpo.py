r"""BNPO as TRL calls it (``loss_type="bnpo"``): the mean over the tokens of each micro-batch.

    L = 1/M Σ_m 1/Σ_{i∈m}|oᵢ| Σ_{i∈m} Σₜ -min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1-ε, 1+ε) Âᵢ),   ε = 0.2

What a token counts for depends on which completions share its micro-batch: with one completion in each it is GRPO's
mean, with one micro-batch for the whole step DAPO's. TRL defines it by its code alone. Beta Normalization Policy
Optimization (https://arxiv.org/abs/2506.02864), which has the same initials, is another method: it divides advantages
by a Beta density, and is not this.
"""

from __future__ import annotations

from trl_variants import Variant

__all__ = ["BNPO"]

BNPO = Variant(
    name="bnpo",
    extends="grpo",
    summary='TRL\'s loss_type="bnpo": the mean over the tokens of each micro-batch; no KL.',
    loss_aggregator="token_mean_local",
    kl=None,
)
