r"""PPO (Schulman et al. 2017) as InstructGPT made it for language models: a critic values every prefix.

    r_t = -β k1_t, the score on the last token;  δ_t = r_t + γ V_{t+1} - V_t; A_t = Σ_l (γλ)^l δ_{t+l},  R_t = A_t + V_t
    L   = 1/Σ|oᵢ| Σᵢ Σₜ [ -min(ρᵢₜ Âᵢₜ, clip(ρᵢₜ, 1-ε, 1+ε) Âᵢₜ) + c ½ max((V-R)², (clip(V, V_old±0.2)-R)²) ]
    γ = 1, λ = 0.95, ε = 0.2, β = 0.05, c = 0.1; Â is A whitened over the whole rollout; 4 epochs over each rollout

``ppo_dual_clip`` bounds the loss of negative advantages (Ye et al. 2020). ``a2c`` is PPO with one update per rollout
(Huang et al. 2022): the ratio is 1, no clip can bind, and what is left is the policy gradient with a critic.
"""

from __future__ import annotations

from trl_variants.variant import KL, Variant, use

PPO = Variant(
    name="ppo",
    paper="https://arxiv.org/abs/1707.06347",
    summary="A critic values every prefix (GAE); KL in the token reward; several clipped epochs over each rollout.",
    advantage_estimator=use("gae", gamma=1.0, lam=0.95),
    advantage_normalizer="batch_std",
    importance_ratio="token",
    clip_rule=use("ppo_clip", epsilon_low=0.2, epsilon_high=0.2),
    loss_aggregator="token_mean",
    kl=KL("k1", placement="token_reward", coef=0.05),
    regularizer=use("value_loss", clip=0.2, coef=0.1),
    critic="separate",
    num_iterations=4,
    reshuffle=True,
)

PPO_DUAL_CLIP = Variant(
    name="ppo_dual_clip",
    extends="ppo",
    paper="https://arxiv.org/abs/1912.09729",
    summary="PPO whose loss on negative advantages is bounded: a ratio that has run away cannot dominate.",
    clip_rule=use("dual_clip", epsilon_low=0.2, epsilon_high=0.2, c=3.0),
)

A2C = Variant(
    name="a2c",
    extends="ppo",
    paper="https://arxiv.org/abs/2205.09123",
    summary="PPO with one epoch and one mini-batch: no ratio, no clip, the policy gradient with a critic.",
    importance_ratio="none",
    clip_rule="policy_gradient",
    regularizer=use("value_loss", clip=None, coef=0.1),
    num_iterations=1,
    max_updates_per_rollout=1,
    reshuffle=False,
)
