r"""REINFORCE (Williams 1992; documents 001, 002): the policy gradient itself, with a constant baseline b.

    L = -1/N Σᵢ Σₜ (rᵢ - b) log π_θ(oᵢₜ)

Data are used once: after one update they are no longer the policy's own, and there is no ratio to correct for that.
"""

from __future__ import annotations

from trl_variants.variant import Variant

REINFORCE = Variant(
    name="reinforce",
    paper="https://doi.org/10.1007/BF00992696",
    summary="The policy gradient with a constant baseline; one update per rollout.",
    advantage_estimator="returns",
    advantage_normalizer="none",
    importance_ratio="none",
    clip_rule="policy_gradient",
    loss_aggregator="seq_mean_token_sum",
    kl=None,
    max_updates_per_rollout=1,
)
