"""The fields of GRPOConfig that a variant decides: refused in a config, with the override to write instead."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from trl_variants.firstparty import where_to_get

__all__ = ["Owned", "OwnedSettings", "refusal"]


class Owned(str):
    """The help text of a field that the variant decides, with what to write instead and what TRL is shown.

    It travels as the help text because the argument parser takes everything else in a field's metadata for its own.
    """

    override: str
    neutral: Any


def _owned(override: str, neutral: Any) -> Any:
    """A field of GRPOConfig that the variant decides.

    Args:
        override: What to write in ``variant_overrides`` instead.
        neutral: What TRL's own checks and constructor see.
    """
    text = Owned(f"Decided by the variant. Use variant_overrides: {{{override}}}.")
    text.override, text.neutral = override, neutral
    return field(default=None, metadata={"help": text})


@dataclass
class OwnedSettings:
    """Fields that stand before GRPOConfig's: None unless a config sets them, which is refused."""

    loss_type: str | None = _owned("loss_aggregator: ...", "grpo")
    beta: float | None = _owned("kl: {coef: ...}", 0.0)
    use_bias_correction_kl: bool | None = _owned("kl: {weighted: ...}", False)
    epsilon: float | None = _owned("clip_rule: {epsilon_low: ..., epsilon_high: ...}", 0.2)
    epsilon_high: float | None = _owned("clip_rule: {epsilon_high: ...}", None)
    delta: float | None = _owned("clip_rule: {name: dual_clip, c: ...}", None)
    importance_sampling_level: str | None = _owned("importance_ratio: ...", "token")
    scale_rewards: str | None = _owned("advantage_normalizer: ...", "none")
    multi_objective_aggregation: str | None = _owned("advantage_estimator: ...", "sum_then_normalize")
    mask_truncated_completions: bool | None = _owned("sample_filter: truncated", False)
    entropy_coef: float | None = _owned("regularizer: {name: entropy_bonus, coef: ...}", 0.0)
    use_adaptive_entropy: bool | None = _owned("regularizer: adaptive_entropy", False)
    entropy_coef_min: float | None = _owned("regularizer: {name: adaptive_entropy, low: ...}", 0.0)
    entropy_coef_max: float | None = _owned("regularizer: {name: adaptive_entropy, high: ...}", 1.0)
    entropy_coef_delta: float | None = _owned("regularizer: {name: adaptive_entropy, delta: ...}", 0.005)
    entropy_target: float | None = _owned("regularizer: {name: adaptive_entropy, target: ...}", 0.2)
    top_entropy_quantile: float | None = _owned(
        "token_weight: [{name: high_entropy_mask, top_entropy_quantile: ...}, rollout_correction]", 1.0
    )
    off_policy_mask_threshold: float | None = _owned(
        "token_weight: [{name: off_policy_mask, threshold: ...}, rollout_correction]", None
    )
    vllm_importance_sampling_correction: bool | None = _owned("token_weight: rollout_correction", False)
    vllm_importance_sampling_mode: str | None = _owned("token_weight: {mode: ...}", "sequence_mask")
    vllm_importance_sampling_clip_max: float | None = _owned("token_weight: {clip_max: ...}", 3.0)
    vllm_importance_sampling_clip_min: float | None = _owned("token_weight: {clip_min: ...}", None)
    vllm_importance_sampling_cap: float | None = _owned("token_weight: {clip_max: ...}", None)
    sapo_temperature_neg: float | None = _owned("clip_rule: {name: sapo, tau_neg: ...}", 1.05)
    sapo_temperature_pos: float | None = _owned("clip_rule: {name: sapo, tau_pos: ...}", 1.0)
    vespo_k_pos: float | None = _owned("clip_rule: {name: vespo, k_pos: ...}", 2.0)
    vespo_lambda_pos: float | None = _owned("clip_rule: {name: vespo, lambda_pos: ...}", 3.0)
    vespo_k_neg: float | None = _owned("clip_rule: {name: vespo, k_neg: ...}", 3.0)
    vespo_lambda_neg: float | None = _owned("clip_rule: {name: vespo, lambda_neg: ...}", 2.0)
    sync_ref_model: bool | None = _owned("kl: ...", False)
    ref_model_mixup_alpha: float | None = _owned("kl: ...", 0.6)
    ref_model_sync_steps: int | None = _owned("kl: ...", 512)


def refusal(name: str, override: str) -> str:
    """Why a field is refused, and what to write instead."""
    if name in ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"):
        return f"{name} is set in the config, but the reference of a variant never changes. Remove it."
    homes = "".join(map(where_to_get, re.findall(r"name: (\w+)", override)))
    return f"{name} is set in the config, but the variant decides it. Use variant_overrides: {{{override}}}.{homes}"
