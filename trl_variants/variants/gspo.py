r"""GSPO (Zheng et al. 2025): one importance ratio per sequence, where the reward is one per sequence too.

    ρᵢ = (π_θ(oᵢ) / π_old(oᵢ))^{1/|oᵢ|}
    L  = 1/N Σᵢ -min(ρᵢ Âᵢ, clip(ρᵢ, 1-3e-4, 1+4e-4) Âᵢ)

The geometric mean stays near 1, hence the small bounds. GSPO-token has the same value with each token's own gradient.
"""

from __future__ import annotations

from trl_variants.variant import Variant, use

GSPO = Variant(
    name="gspo",
    extends="grpo",
    paper="https://arxiv.org/abs/2507.18071",
    summary="One ratio per sequence, clipped as a whole.",
    importance_ratio="sequence",
    clip_rule=use("ppo_clip", epsilon_low=3e-4, epsilon_high=4e-4),
    kl=None,
)

GSPO_TOKEN = Variant(
    name="gspo_token",
    extends="gspo",
    paper="https://arxiv.org/abs/2507.18071",
    summary="GSPO's ratio in value with each token's own gradient; advantages may differ by token.",
    importance_ratio="sequence_token",
)
