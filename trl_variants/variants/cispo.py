r"""CISPO (MiniMax-M1 2025): cap the importance weight instead of cutting the gradient.

    L = 1/Σ|oᵢ| Σᵢ Σₜ -sg[min(ρᵢₜ, 5)] Âᵢ log π_θ(oᵢₜ)

A token whose ratio is past the cap, often the rare one that turns the reasoning, still learns.
"""

from __future__ import annotations

from trl_variants.variant import Variant, use

CISPO = Variant(
    name="cispo",
    extends="grpo",
    paper="https://arxiv.org/abs/2506.13585",
    summary="Importance weights are capped, gradients never cut.",
    clip_rule=use("cispo", epsilon_max=5.0),
    loss_aggregator="token_mean",
    kl=None,
)
