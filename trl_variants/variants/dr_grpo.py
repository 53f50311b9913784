r"""Dr. GRPO (Liu et al. 2025): GRPO without its two biased normalizations.

    Aᵢ = rᵢ - mean(r₁…r_G)
    L  = 1/(N L_max) Σᵢ Σₜ -min(ρᵢₜ Aᵢ, clip(ρᵢₜ, 1-ε, 1+ε) Aᵢ),   ε = 0.2

Dividing by the standard deviation favours prompts that are nearly solved or hopeless; dividing by a completion's own
length makes long wrong answers cheap.
"""

from __future__ import annotations

from trl_variants.variant import Variant

DR_GRPO = Variant(
    name="dr_grpo",
    extends="grpo",
    paper="https://arxiv.org/abs/2503.20783",
    summary="GRPO without the standard deviation and without the length of each completion.",
    advantage_normalizer="none",
    loss_aggregator="seq_mean_token_sum_norm",
    kl=None,
)
