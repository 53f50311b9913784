r"""Decoupled PPO (Hilton et al. 2022; AReaL, Fu et al. 2025): three policies, each for what it is good for.

    L = E[ -w min(ρ Â, clip(ρ, 1-ε, 1+ε) Â) ],   ρ = π_θ / π_prox,   w = π_prox / π_behav where that is <= 5, else 0

The behaviour policy π_behav drew the tokens, and w corrects for that; the proximal policy π_prox is the one to stay
near. Here π_behav is the generation engine's policy, however old its weights are, and π_prox is the trainer's own at
the first update on the rollout (the *old* policy), as in AReaL's ``use_decoupled_loss`` with recomputed log-probs. So
w is the core's ``rollout_correction`` per token, its cap AReaL's ``behav_imp_weight_cap``: a token above it is dropped
and stays in the denominator. Hilton et al. have no cap, and an average of past weights for π_prox, which is not here.

Where the engine returns no log-probs (generation by transformers), behaviour and proximal policy are one, w is 1, and
these are PPO and GRPO.
"""

from __future__ import annotations

from trl_variants import Variant, use

__all__ = ["VARIANTS"]

_CAPPED = use("rollout_correction", mode="token_mask", clip_max=5.0)

VARIANTS = [
    Variant(
        name="decoupled_ppo",
        extends="ppo",
        paper="https://arxiv.org/abs/2110.00641",
        summary="PPO clipped about the policy at the rollout, corrected for the policy that drew the tokens.",
        token_weight=_CAPPED,
    ),
    Variant(
        name="decoupled_grpo",
        extends="grpo",
        paper="https://arxiv.org/abs/2505.24298",
        summary="GRPO clipped about the policy at the rollout, corrected for the policy that drew the tokens.",
        token_weight=_CAPPED,
    ),
]
