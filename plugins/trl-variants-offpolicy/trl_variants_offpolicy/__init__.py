"""Off-policy training for trl-variants: rollout corrections beyond TRL's four, masks, trust regions, decoupled PPO.

Three policies are told apart, and every docstring says which two are compared: *current* π_θ, which is trained; *old*
π_old, the trainer's policy at the rollout; *sampler* π_sampler, as the generation engine computed it. With generation
by transformers there is no third: corrections are 1, and where the current policy is compared with the sampler, the
old one stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl_variants import Variant, hookimpl
from trl_variants_offpolicy import corrections, decoupled, dppo, m2po, opsm, topr

__version__ = "0.1.0"


@hookimpl
def register_clip_rules() -> list[Callable[..., Any]]:
    return [dppo.dppo_tv, dppo.dppo_kl, topr.topr, m2po.m2po]


@hookimpl
def register_token_weights() -> list[Callable[..., Any]]:
    return [
        corrections.geometric_correction,
        corrections.rejection,
        opsm.off_policy_mask,
        m2po.second_moment_mask,
    ]


@hookimpl
def register_variants() -> list[Variant]:
    return [
        *corrections.VARIANTS,
        opsm.OPSM_GRPO,
        *decoupled.VARIANTS,
        *dppo.VARIANTS,
        topr.TOPR,
        m2po.M2PO,
    ]
