r"""Skywork-OR1 (He et al. 2025): GRPO whose entropy bonus switches itself on where entropy falls to a target.

    L = 1/Σ|oᵢ| Σᵢ Σₜ [ -min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1-0.2, 1+0.2) Âᵢ) - α Hᵢₜ ],   over groups whose rewards differ
    α = c where the last step's mean H ≤ 0.2, else 0;   c ← c + 0.005 where it is, else c - 0.005, from 0 up

The authors call it MAGIC: besides, no KL, a mean over tokens, groups of equal rewards left out and not replaced, one
optimizer step for each rollout, temperature 1, and completions cut by the limit judged as they are.
"""

from __future__ import annotations

from trl_variants import Variant, use

__all__ = ["SKYWORK_OR1"]

SKYWORK_OR1 = Variant(
    name="skywork_or1",
    extends="grpo",
    paper="https://arxiv.org/abs/2505.22312",
    summary="An entropy bonus that adapts to hold a target, groups without signal left out, token mean, no KL.",
    sample_filter="zero_variance",
    regularizer=use("adaptive_entropy", target=0.2, delta=0.005),
    loss_aggregator="token_mean",
    kl=None,
)
