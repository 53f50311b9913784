"""What the package itself registers, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl_variants.components import (
    advantages,
    aggregators,
    clip_rules,
    filters,
    kl,
    normalizers,
    ratios,
    regularizers,
    rewards,
    weights,
)
from trl_variants.hookspecs import hookimpl
from trl_variants.variant import Variant
from trl_variants.variants import cispo, dapo, dr_grpo, grpo, gspo, ppo, reinforce, reinforce_pp, rloo, trl_defaults

Components = list[Callable[..., Any]]


@hookimpl
def register_sample_filters() -> Components:
    return [filters.zero_variance, filters.mean_band, filters.truncated]


@hookimpl
def register_reward_shapers() -> Components:
    return [
        rewards.soft_overlong,
        rewards.missing_eos_penalty,
        rewards.clip_rewards,
        rewards.whiten_rewards,
        rewards.whiten_token_rewards,
    ]


@hookimpl
def register_kl_estimators() -> Components:
    return [kl.k1, kl.k2, kl.k3, kl.abs_kl]


@hookimpl
def register_kl_placements() -> Components:
    return [kl.token_reward, kl.sequence_reward, kl.loss]


@hookimpl
def register_kl_controllers() -> Components:
    return [kl.fixed, kl.adaptive]


@hookimpl
def register_advantage_estimators() -> Components:
    return [
        advantages.returns,
        advantages.group_mean,
        advantages.leave_one_out,
        advantages.reward_to_go,
        advantages.gae,
    ]


@hookimpl
def register_advantage_normalizers() -> Components:
    return [normalizers.group_std, normalizers.batch_std]


@hookimpl
def register_importance_ratios() -> Components:
    return [ratios.token, ratios.sequence, ratios.sequence_token, ratios.sequence_sum, ratios.no_ratio]


@hookimpl
def register_clip_rules() -> Components:
    return [clip_rules.policy_gradient, clip_rules.ppo_clip, clip_rules.dual_clip, clip_rules.cispo]


@hookimpl
def register_token_weights() -> Components:
    return [weights.rollout_correction]


@hookimpl
def register_regularizers() -> Components:
    return [regularizers.entropy_bonus, regularizers.adaptive_entropy, regularizers.value_loss]


@hookimpl
def register_loss_aggregators() -> Components:
    return [
        aggregators.token_mean,
        aggregators.seq_mean_token_mean,
        aggregators.seq_mean_token_sum,
        aggregators.seq_mean_token_sum_norm,
        aggregators.token_mean_local,
    ]


@hookimpl
def register_variants() -> list[Variant]:
    return [
        reinforce.REINFORCE,
        ppo.PPO,
        ppo.PPO_DUAL_CLIP,
        ppo.A2C,
        grpo.GRPO,
        rloo.RLOO,
        reinforce_pp.REINFORCE_PP,
        reinforce_pp.REINFORCE_PP_BASELINE,
        dr_grpo.DR_GRPO,
        dapo.DAPO,
        gspo.GSPO,
        gspo.GSPO_TOKEN,
        cispo.CISPO,
        *trl_defaults.VARIANTS,
    ]
