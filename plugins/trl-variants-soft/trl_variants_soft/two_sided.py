r"""Two-sided GRPO (INTELLECT-2, 2025): a bound on the ratio where the advantage is negative, too.

    L = 1/N Σᵢ 1/|oᵢ| Σₜ [ -min(min(ρᵢₜ, δ) Âᵢ, clip(ρᵢₜ, 1-ε, 1+ε) Âᵢ) + β k3ᵢₜ ],   δ = 4, ε = 0.2, β = 0.001

Where Âᵢ < 0, GRPO's loss -ρ Â grows with the ratio without end, and one token may blow the gradient up. With δ above
1+ε the bound acts there only, and this is PPO's dual clip with c = δ: the core's rule under its older name.
"""

from __future__ import annotations

from trl_variants import KL, Variant, use

__all__ = ["TWO_SIDED_GRPO"]

TWO_SIDED_GRPO = Variant(
    name="two_sided_grpo",
    extends="grpo",
    paper="https://arxiv.org/abs/2505.07291",
    summary="GRPO whose ratio is bounded by δ (c of dual_clip) where the advantage is negative.",
    clip_rule=use("dual_clip", epsilon_low=0.2, epsilon_high=0.2, c=4.0),
    kl=KL("k3", placement="loss", coef=0.001),
)
