"""Checks of a config across its fields: the schedule of rollouts and steps, repeated updates, the critic."""

from __future__ import annotations

import math
import os
from math import gcd
from typing import TYPE_CHECKING

from trl_variants.errors import VariantError, did_you_mean, listing
from trl_variants.trainer.prefill_reasons import config_reason

if TYPE_CHECKING:
    from trl_variants.recipe import Recipe
    from trl_variants.trainer.config import VariantConfig

__all__ = [
    "can_carry",
    "check_engine",
    "check_layout",
    "check_learning",
    "check_prefill",
    "check_sampling",
    "check_schedule",
]

_CRITIC = ("critic_model", "critic_learning_rate", "critic_max_grad_norm", "critic_warmup_steps")
_SAMPLING = ("max_rounds", "carry_surplus", "max_carry_age")


def check_schedule(config: VariantConfig) -> None:
    """Check how completions, generations and optimizer steps divide into one another.

    Raises:
        VariantError: They do not; the message has the product, and the nearest values that fit.
    """
    generations, steps, accumulation = (
        config.num_generations,
        config.steps_per_generation,
        config.gradient_accumulation_steps,
    )
    if generations < 1 or config.num_iterations < 1:
        raise VariantError(
            f"num_generations ({generations}) and num_iterations ({config.num_iterations}) must be at least 1."
        )
    config.recipe.check_generations(generations)
    batch, processes = config.generation_batch_size, config.world_size
    per_device = config.per_device_train_batch_size
    product = f"per_device_train_batch_size {per_device} x {processes} process(es) x steps_per_generation {steps}"
    if batch % generations:
        unit = generations // gcd(generations, processes * steps)
        lower, upper = per_device // unit * unit, -(-per_device // unit) * unit
        fitting = [n for n in range(max(2, config.recipe.min_generations), batch + 1) if batch % n == 0]
        nearest = sorted(fitting, key=lambda n: abs(n - generations))[:2]
        raise VariantError(
            f"A rollout is {product} = {batch} completions, which are no whole number of groups of "
            f"num_generations {generations}. Nearest that fit: per_device_train_batch_size "
            f"{_either(lower, upper)}" + (f", or num_generations {_either(*sorted(nearest))}." if nearest else ".")
        )
    eval_generations = config.num_generations_eval or generations
    if eval_generations < 1:
        raise VariantError(f"num_generations_eval ({eval_generations}) must be at least 1.")
    if config.eval_strategy != "no" and (config.per_device_eval_batch_size * processes) % eval_generations:
        raise VariantError(
            f"An evaluation batch is per_device_eval_batch_size {config.per_device_eval_batch_size} x {processes} "
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
    updates, most = config.updates_per_rollout, config.recipe.variant.max_updates_per_rollout
    if most is not None and updates > most:
        raise VariantError(
            f"variant '{config.recipe.variant.name}' allows {most} update(s) per rollout: it does not correct for a "
            f"policy that has moved on. num_iterations {config.num_iterations} x steps_per_generation {steps} / "
            f"gradient_accumulation_steps {accumulation} makes {updates}. Set num_iterations: 1 and "
            f"steps_per_generation: {accumulation}, or use a variant with a clip rule."
        )


def check_layout(config: VariantConfig) -> None:
    """Check how a rollout is laid out.

    Raises:
        VariantError: A value is not one of the choices.
    """
    for name, choices in (("shuffle", ("rows", "groups")), ("share_prompts", ("auto", "always", "never"))):
        value = getattr(config, name)
        if value not in choices:
            raise VariantError(f"{name} must be {listing(choices)}, not {value!r}.{did_you_mean(str(value), choices)}")
    if not isinstance(config.cut_micro_batches, bool):
        raise VariantError(f"cut_micro_batches must be true or false, not {config.cut_micro_batches!r}.")
    if config.share_prompts == "always" and config.gradient_checkpointing:
        raise VariantError(
            "share_prompts is always, and gradient checkpointing keeps no cache that prompts could be shared through. "
            "Set gradient_checkpointing: false, or share_prompts: auto."
        )


def check_learning(config: VariantConfig) -> None:
    """Check the fields of the critic and ``target_kl``.

    Raises:
        VariantError: A value is out of range, has no effect, or does not go with the rest.
    """
    critic = config.recipe.variant.critic
    if critic is None:
        _refuse_critic_fields(config)
    if critic == "shared" and config.critic_model is not None:
        raise VariantError(
            "critic_model is set, and a shared critic is a head on the policy's backbone. Use variant_overrides: "
            "{critic: separate}, or leave critic_model out."
        )
    for name in ("critic_learning_rate", "target_kl", "critic_max_grad_norm", "critic_warmup_steps"):
        _check_number(config, name)
    if config.critic_model is not None and not (isinstance(config.critic_model, str) and config.critic_model):
        raise VariantError(
            f"critic_model must be a folder or an id, not {config.critic_model!r}; a model goes to the trainer."
        )
    if config.target_kl is not None and config.updates_per_rollout == 1:
        raise VariantError(
            "target_kl is set, and there is one update per rollout, so there is none left to stop. Set num_iterations "
            "to 2 or more, or steps_per_generation to a multiple of gradient_accumulation_steps, or leave it out."
        )
    if critic:
        _check_critic(config)
    if _steps_apart(config):
        _check_fsdp(config)
    if _steps_apart(config) and config.fp16:
        raise VariantError(
            "fp16 scales the loss, which goes wrong in steps without a gradient of the policy, as in a critic's "
            "warm-up or after target_kl. Use bf16: true, or neither."
        )


def _check_number(config: VariantConfig, name: str) -> None:
    value = getattr(config, name)
    if value is None:
        return
    kind: type | tuple[type, ...] = int if name == "critic_warmup_steps" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise VariantError(f"{name} must be {'a whole number' if kind is int else 'a number'}, not {value!r}.")
    least, said = (0, "at least 0") if name in ("critic_max_grad_norm", "critic_warmup_steps") else (None, "above 0")
    if not (value < math.inf and (value > 0 if least is None else value >= least)):
        raise VariantError(f"{name} must be {said}, not {value}.")


def _refuse_critic_fields(config: VariantConfig) -> None:
    unused = [name for name in _CRITIC if getattr(config, name) is not None]
    if unused:
        raise VariantError(
            f"{', '.join(unused)} is set, and variant '{config.recipe.variant.name}' has no critic. Use variant: "
            "ppo, or leave it out."
        )


def _check_critic(config: VariantConfig) -> None:
    recipe, warmup = config.recipe, config.critic_warmup_steps or 0
    if not any(b.info.needs("values") and b.parameters["coef"] > 0 for b in recipe.regularizers):
        raise VariantError(
            f"variant '{recipe.variant.name}' has a critic, and no regularizer trains it. Add value_loss to "
            "regularizer, with a coef above 0."
        )
    if warmup >= config.max_steps > 0:
        raise VariantError(
            f"critic_warmup_steps ({warmup}) leaves none of the {config.max_steps} steps (max_steps) for the policy."
        )
    if config.torch_compile:
        raise VariantError("torch_compile is not supported with a critic in this release. Leave one of them out.")
    if config.optim.value.startswith("schedule_free"):
        raise VariantError(f"optim {config.optim.value} cannot step a critic as well. Use optim: adamw_torch.")
    if config.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise VariantError(
            f"lr_scheduler_type {config.lr_scheduler_type.value} steps by a metric, and a critic has none. Use another."
        )


def can_carry(recipe: Recipe) -> bool:
    """Whether a variant can learn from groups of an earlier rollout: it corrects for a policy that has moved on."""
    return recipe.importance_ratio.info.level != "one" and recipe.variant.max_updates_per_rollout is None


def check_sampling(config: VariantConfig) -> None:
    """Check the fields of resampling.

    Raises:
        VariantError: A value is out of range, has no effect, or does not go with the variant.
    """
    variant = config.recipe.variant
    given = [name for name in _SAMPLING if getattr(config, name) is not None]
    if given and variant.sampling != "resample":
        filters = "" if config.recipe.sample_filters else ", sample_filter: zero_variance"
        raise VariantError(
            f"{', '.join(given)} is set, and variant '{variant.name}' draws no further prompts (sampling: mask). Use "
            f"variant_overrides: {{sampling: resample{filters}}}, or leave it out."
        )
    for name in ("max_rounds", "max_carry_age"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            least = "; to carry none, use carry_surplus: false" if name == "max_carry_age" else ""
            raise VariantError(f"{name} must be a whole number of at least 1, not {value!r}{least}.")
    if not isinstance(config.carry_surplus, bool | None):
        raise VariantError(f"carry_surplus must be true or false, not {config.carry_surplus!r}.")
    carries = config.carry_surplus is not False and can_carry(config.recipe)
    if config.carry_surplus and not carries:
        raise VariantError(
            f"carry_surplus is set, and variant '{variant.name}' does not correct for a policy that has moved on. "
            "Leave it out, or use a variant with an importance ratio and a clip rule."
        )
    if config.max_carry_age is not None and not carries:
        raise VariantError("max_carry_age is set, and no surplus is carried. Set carry_surplus: true, or leave it out.")


def check_engine(config: VariantConfig) -> None:
    """Refuse DeepSpeed with a critic or ``target_kl``, before TRL's own checks start it.

    Raises:
        VariantError: The config or the launcher asks for DeepSpeed.
    """
    if _steps_apart(config) and (config.deepspeed or _launched_with("DEEPSPEED")):
        raise VariantError(
            "DeepSpeed is not supported with a critic or target_kl in this release. Use DDP (accelerate launch "
            "--multi_gpu) or FSDP2 (--use_fsdp --fsdp_version 2), or a variant without a critic."
        )


def _steps_apart(config: VariantConfig) -> bool:
    """Whether some optimizer steps leave the policy as it is, or step something beside it."""
    return bool(config.recipe.variant.critic or config.target_kl)


def _launched_with(engine: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def _check_fsdp(config: VariantConfig) -> None:
    if config.fsdp:
        version = (config.fsdp_plugin_args or {}).get("fsdp_version")
    elif _launched_with("FSDP"):
        version = int(os.environ.get("FSDP_VERSION", "1"))  # accelerate's default
    else:
        return
    if version != 2:
        raise VariantError(
            "FSDP1 is not supported with a critic or target_kl. Use FSDP2: fsdp_version: 2 in the config of accelerate "
            "launch, or version: 2 in fsdp_config."
        )


def check_prefill(config: VariantConfig) -> None:
    """Refuse ``prefill_once: true`` where it could have no effect.

    Raises:
        VariantError: It could not.
    """
    if not isinstance(config.prefill_once, bool | None):
        raise VariantError(f"prefill_once must be true, false or null, not {config.prefill_once!r}.")
    if not config.prefill_once:
        return
    reason = config_reason(config)
    if reason is None and config.num_generations == 1 and (config.num_generations_eval or 1) == 1:
        reason = "num_generations is 1, so that no prompt repeats"
    if reason:
        raise VariantError(f"prefill_once is true, and cannot apply: {reason}. Leave prefill_once out.")


def _either(*values: int) -> str:
    return " or ".join(str(value) for value in dict.fromkeys(values) if value > 0)
