"""`VariantConfig`: TRL's GRPOConfig, with a variant instead of the settings that a variant decides."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from math import gcd
from typing import Any

from trl import GRPOConfig

from trl_variants.errors import VariantError
from trl_variants.recipe import Recipe
from trl_variants.registry import load_registry
from trl_variants.rehearsal import rehearse
from trl_variants.resolution import resolve
from trl_variants.variant import KL, Use, Variant

__all__ = ["VariantConfig"]

_DEFAULT_GENERATIONS = 8  # TRL's


class _Owned(str):
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
    text = _Owned(f"Decided by the variant. Use variant_overrides: {{{override}}}.")
    text.override, text.neutral = override, neutral
    return field(default=None, metadata={"help": text})


@dataclass
class VariantConfig(GRPOConfig):
    """Configuration of `VariantTrainer`: `trl.GRPOConfig` plus a variant.

    Parameters:
        variant (`str`, *optional*, defaults to `"grpo"`):
            Name of a registered variant; ``trl-variants list`` shows them. From Python also a `Variant`.
        variant_overrides (`dict[str, Any]`, *optional*):
            Changes to the variant by slot: `{slot: name}`, `{slot: {name: ..., param: ...}}`, `{slot: {param: ...}}`,
            a list for slots that take several, or `none` to switch a slot off.
        variant_plugins (`list[str]`, *optional*):
            Dotted modules or `.py` files with components and variants of your own, besides the installed plugins.
        num_generations (`int`, *optional*):
            Completions per prompt. Default: 8, or 1 where the variant's components can do with one.
        num_iterations (`int`, *optional*):
            Epochs over each rollout. Default: the variant's.

    What the variant decides (`beta`, `loss_type`, `epsilon`, `scale_rewards`, ...) is refused here, with the override
    to use instead. Every other field is TRL's.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "variant_overrides"]

    variant: str = field(
        default="grpo", metadata={"help": "Name of a registered variant; `trl-variants list` shows them."}
    )
    variant_overrides: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Changes to the variant by slot, e.g. {clip_rule: {epsilon_high: 0.28}, kl: none}."},
    )
    variant_plugins: list[str] | None = field(
        default=None,
        metadata={"help": "Dotted modules or .py files with components and variants, besides the installed plugins."},
    )

    # The variant proposes, the user wins.
    num_generations: int | None = field(
        default=None,
        metadata={"help": "Completions per prompt. Default: 8, or 1 where the variant's components can do with one."},
    )
    num_iterations: int | None = field(
        default=None, metadata={"help": "Epochs over each rollout. Default: the variant's."}
    )

    # The variant alone.
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
    top_entropy_quantile: float | None = _owned("token_weight: ...", 1.0)
    off_policy_mask_threshold: float | None = _owned("token_weight: ...", None)
    vllm_importance_sampling_correction: bool | None = _owned("token_weight: rollout_correction", False)
    vllm_importance_sampling_mode: str | None = _owned("token_weight: {mode: ...}", "sequence_mask")
    vllm_importance_sampling_clip_max: float | None = _owned("token_weight: {clip_max: ...}", 3.0)
    vllm_importance_sampling_clip_min: float | None = _owned("token_weight: {clip_min: ...}", None)
    vllm_importance_sampling_cap: float | None = _owned("token_weight: {clip_max: ...}", None)
    sapo_temperature_neg: float | None = _owned("clip_rule: ...", 1.05)
    sapo_temperature_pos: float | None = _owned("clip_rule: ...", 1.0)
    vespo_k_pos: float | None = _owned("clip_rule: ...", 2.0)
    vespo_lambda_pos: float | None = _owned("clip_rule: ...", 3.0)
    vespo_k_neg: float | None = _owned("clip_rule: ...", 3.0)
    vespo_lambda_neg: float | None = _owned("clip_rule: ...", 2.0)
    sync_ref_model: bool | None = _owned("kl: ...", False)
    ref_model_mixup_alpha: float | None = _owned("kl: ...", 0.6)
    ref_model_sync_steps: int | None = _owned("kl: ...", 512)

    def __post_init__(self) -> None:
        """Resolve the variant, then run every check of TRL's with neutral values in the fields that it decides."""
        set_here = [owned for owned in self._owned_fields() if getattr(self, owned.name) is not None]
        if set_here:
            raise VariantError("\n".join(_refusal(owned.name, owned.metadata["help"].override) for owned in set_here))
        for owned in self._owned_fields():
            setattr(self, owned.name, owned.metadata["help"].neutral)
        if isinstance(self.variant_overrides, str):
            self.variant_overrides = _parse_mapping(self.variant_overrides)
        self._recipe = self._resolve()
        if self._recipe.variant.critic:
            raise VariantError(
                f"variant '{self._recipe.variant.name}' has a critic; VariantTrainer trains none in this release."
            )
        if self.num_iterations is None:
            self.num_iterations = self._recipe.variant.num_iterations or 1
        if self.num_generations is None:
            proposed = self._recipe.variant.num_generations
            self.num_generations = proposed or (_DEFAULT_GENERATIONS if self._recipe.min_generations > 1 else 1)
        with self._generations_unchecked():
            super().__post_init__()
        self._check_schedule()
        rehearse(self._recipe, max_length=self.max_completion_length)

    @property
    def recipe(self) -> Recipe:
        """The variant with every component bound."""
        if "_recipe" not in self.__dict__:  # pickling leaves it out
            self._recipe = self._resolve()
        return self._recipe

    def _resolve(self) -> Recipe:
        return resolve(self.variant, self.variant_overrides, load_registry(extra=self.variant_plugins or ()))

    @classmethod
    def _owned_fields(cls) -> Iterator[Any]:
        return (f for f in fields(cls) if isinstance(f.metadata.get("help"), _Owned))

    @contextmanager
    def _generations_unchecked(self) -> Iterator[None]:
        """Run TRL's checks with a number of generations that passes the two that are ours.

        TRL refuses one generation, and words divisibility without saying what would fit; both checks sit in the middle
        of others, which must all run.
        """
        generations, generations_eval = int(self.num_generations), self.num_generations_eval
        self.num_generations = _Unchecked(generations)
        self.num_generations_eval = _Unchecked(generations_eval or generations)
        try:
            yield
        finally:
            self.num_generations, self.num_generations_eval = generations, generations_eval

    def _check_schedule(self) -> None:
        """Check how completions, generations and optimizer steps divide into one another."""
        generations, steps, accumulation = (
            self.num_generations,
            self.steps_per_generation,
            self.gradient_accumulation_steps,
        )
        if generations < 1 or self.num_iterations < 1:
            raise VariantError(
                f"num_generations ({generations}) and num_iterations ({self.num_iterations}) must be at least 1."
            )
        self._recipe.check_generations(generations)
        batch, processes = self.generation_batch_size, self.world_size
        per_device = self.per_device_train_batch_size
        product = f"per_device_train_batch_size {per_device} x {processes} process(es) x steps_per_generation {steps}"
        if batch % generations:
            unit = generations // gcd(generations, processes * steps)
            lower, upper = per_device // unit * unit, -(-per_device // unit) * unit
            fitting = [n for n in range(max(2, self._recipe.min_generations), batch + 1) if batch % n == 0]
            nearest = sorted(fitting, key=lambda n: abs(n - generations))[:2]
            raise VariantError(
                f"A rollout is {product} = {batch} completions, which are no whole number of groups of "
                f"num_generations {generations}. Nearest that fit: per_device_train_batch_size "
                f"{_either(lower, upper)}" + (f", or num_generations {_either(*sorted(nearest))}." if nearest else ".")
            )
        eval_generations = self.num_generations_eval or generations
        if eval_generations < 1:
            raise VariantError(f"num_generations_eval ({eval_generations}) must be at least 1.")
        if self.eval_strategy != "no" and (self.per_device_eval_batch_size * processes) % eval_generations:
            raise VariantError(
                f"An evaluation batch is per_device_eval_batch_size {self.per_device_eval_batch_size} x {processes} "
                f"process(es), which is no whole number of groups of num_generations_eval {eval_generations}. Set "
                f"num_generations_eval: 1, or make per_device_eval_batch_size a multiple of "
                f"{eval_generations // gcd(eval_generations, processes)}."
            )
        if steps % accumulation:
            lower, upper = steps // accumulation * accumulation, -(-steps // accumulation) * accumulation
            raise VariantError(
                f"steps_per_generation ({steps}) must be a multiple of gradient_accumulation_steps ({accumulation}): "
                "otherwise an optimizer step would span two rollouts. Nearest that fit: steps_per_generation "
                f"{_either(lower, upper)}."
            )
        updates, most = self.num_iterations * steps // accumulation, self._recipe.variant.max_updates_per_rollout
        if most is not None and updates > most:
            raise VariantError(
                f"variant '{self._recipe.variant.name}' allows {most} update(s) per rollout: it does not correct for a "
                f"policy that has moved on. num_iterations {self.num_iterations} x steps_per_generation {steps} / "
                f"gradient_accumulation_steps {accumulation} makes {updates}. Set num_iterations: 1 and "
                f"steps_per_generation: {accumulation}, or use a variant with a clip rule."
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields, for logging: those that the variant decides are None, so that no log shows what is not used."""
        shown = super().to_dict()
        shown |= {owned.name: None for owned in self._owned_fields() if owned.name in shown}
        return shown | {"variant": _plain(self.variant), "variant_overrides": _plain(self.variant_overrides)}

    def __str__(self) -> str:
        """What is logged, tokens hidden. (TrainingArguments copies every value for it, and functions cannot be.)"""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def __getstate__(self) -> dict[str, Any]:
        """What a checkpoint keeps: components by name, since a function of a notebook cannot be pickled."""
        state = {name: value for name, value in self.__dict__.items() if name != "_recipe"}
        return state | {"variant": _plain(self.variant), "variant_overrides": _plain(self.variant_overrides)}

    def __deepcopy__(self, memo: dict[int, Any]) -> VariantConfig:
        """A copy that keeps the recipe, whose components are functions."""
        shared = ("_recipe", "variant", "variant_overrides")
        new = object.__new__(type(self))
        new.__dict__.update(
            {name: value if name in shared else copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        )
        return new


class _Unchecked(int):
    """A number that is never too small, and divides everything."""

    def __lt__(self, other: object) -> bool:
        return False

    def __rmod__(self, other: object) -> int:
        return 0


def _refusal(name: str, override: str) -> str:
    if override.endswith("_weight: ...") or name.startswith(("sapo", "vespo")):
        override += " (with a component that does this, from a plugin)"
        return f"{name} is set in the config, but the variant decides it. Use variant_overrides: {{{override}}}."
    if name in ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"):
        return f"{name} is set in the config, but the reference of a variant never changes. Remove it."
    return f"{name} is set in the config, but the variant decides it. Use variant_overrides: {{{override}}}."


def _either(*values: int) -> str:
    return " or ".join(str(value) for value in dict.fromkeys(values) if value > 0)


def _parse_mapping(text: str) -> dict[str, Any]:
    """A mapping from the command line, in JSON or YAML."""
    import yaml

    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise VariantError(f"variant_overrides is neither JSON nor YAML: {error}") from error
    if not isinstance(value, dict):
        raise VariantError(f"variant_overrides must be a mapping by slot, not {text!r}.")
    return value


def _plain(value: Any) -> Any:
    """A value without functions: components by module and name, in the form that a config has."""
    if isinstance(value, Variant):
        return value.name
    if isinstance(value, Use):
        return {"name": _plain(value.component), **_plain(dict(value.parameters))}
    if isinstance(value, KL):
        return {key.name: _plain(getattr(value, key.name)) for key in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else str(value)
