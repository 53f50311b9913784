r"""DAPO (Yu et al. 2025): four changes to GRPO, each against something seen in training.

    L = 1/Σ|oᵢ| Σᵢ Σₜ -min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1-0.2, 1+0.28) Âᵢ),   groups of equal rewards replaced by new ones

Clip-higher against the collapse of entropy, dynamic sampling against groups without signal, the mean over tokens
against unequal weights in long answers, a soft penalty against overlong ones; and no KL.
"""

from __future__ import annotations

from trl_variants.variant import Variant, use

DAPO = Variant(
    name="dapo",
    extends="grpo",
    paper="https://arxiv.org/abs/2503.14476",
    summary="Clip-higher, groups without signal replaced by new ones, token mean, soft overlong penalty, no KL.",
    sample_filter="zero_variance",
    reward_shaper="soft_overlong",
    clip_rule=use("ppo_clip", epsilon_low=0.2, epsilon_high=0.28),
    loss_aggregator="token_mean",
    kl=None,
    sampling="resample",
)
