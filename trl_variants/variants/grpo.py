r"""GRPO (Shao et al. 2024, DeepSeekMath): the mean of a prompt's own completions instead of a critic.

Âᵢ = (rᵢ - mean(r₁…r_G)) / std(r₁…r_G)
L  = 1/N Σᵢ 1/|oᵢ| Σₜ [ -min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1-ε, 1+ε) Âᵢ) + β k3ᵢₜ ],   ε = 0.2, β = 0.04
"""

from __future__ import annotations

from trl_variants.variant import KL, Variant, use

GRPO = Variant(
    name="grpo",
    paper="https://arxiv.org/abs/2402.03300",
    summary="Advantages relative to the prompt's own group; no critic.",
    advantage_estimator="group_mean",
    advantage_normalizer="group_std",
    importance_ratio="token",
    clip_rule=use("ppo_clip", epsilon_low=0.2, epsilon_high=0.2),
    loss_aggregator="seq_mean_token_mean",
    kl=KL("k3", placement="loss", coef=0.04),
)
