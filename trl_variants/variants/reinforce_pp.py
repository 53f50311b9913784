r"""REINFORCE++ (Hu 2025): the whole batch as the baseline, so one completion per prompt is enough.

    Aₜ = Σ_{s≥t} r_s,  r_s = -β k1_s, the score on the last token;  Âₜ = (Aₜ - mean) / std over all tokens of the batch
    L  = 1/Σ|oᵢ| Σᵢ Σₜ -min(ρᵢₜ Âᵢₜ, clip(ρᵢₜ, 1-ε, 1+ε) Âᵢₜ),   ε = 0.2, β = 0.01

REINFORCE++-baseline subtracts the group's mean first, and takes KL (k2) into the loss.
"""

from __future__ import annotations

from trl_variants.variant import KL, Variant, use

REINFORCE_PP = Variant(
    name="reinforce_pp",
    paper="https://arxiv.org/abs/2501.03262",
    summary="Reward-to-go of token rewards, whitened over the whole batch; one completion per prompt is enough.",
    advantage_estimator="reward_to_go",
    advantage_normalizer="batch_std",
    importance_ratio="token",
    clip_rule=use("ppo_clip", epsilon_low=0.2, epsilon_high=0.2),
    loss_aggregator="token_mean",
    kl=KL("k1", placement="token_reward", coef=0.01),
)

REINFORCE_PP_BASELINE = Variant(
    name="reinforce_pp_baseline",
    extends="reinforce_pp",
    paper="https://arxiv.org/abs/2501.03262",
    summary="Group mean first, then whitened over the whole batch; KL in the loss.",
    advantage_estimator="group_mean",
    kl=KL("k2", placement="loss", coef=1e-3),
)
