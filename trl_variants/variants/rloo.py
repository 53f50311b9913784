r"""RLOO (Ahmadian et al. 2024): each completion against the mean of its siblings, and nothing else.

    Aᵢ = Rᵢ - 1/(G-1) Σ_{j≠i} Rⱼ,   Rᵢ = rᵢ - β Σₜ k1ᵢₜ,   β = 0.05
    L  = -1/N Σᵢ Σₜ Aᵢ log π_θ(oᵢₜ)

No clip and no ratio: one update per rollout.
"""

from __future__ import annotations

from trl_variants.variant import KL, Variant

RLOO = Variant(
    name="rloo",
    paper="https://arxiv.org/abs/2402.14740",
    summary="Leave-one-out baseline and the plain policy gradient; one update per rollout.",
    advantage_estimator="leave_one_out",
    advantage_normalizer="none",
    importance_ratio="none",
    clip_rule="policy_gradient",
    loss_aggregator="seq_mean_token_sum",
    kl=KL("k1", placement="sequence_reward", coef=0.05),
    max_updates_per_rollout=1,
)
