"""The private names of TRL that this package builds on, checked against the installed version when it is imported."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import version
from typing import Any

import trl
from packaging.specifiers import SpecifierSet

from trl_variants.errors import VariantError

__all__ = ["VISION_INPUTS", "check_trl"]

SUPPORTED = ("1.16", "1.17")

#: Methods that are overridden or called, with the parameters that are relied on, in order.
METHODS = {
    "_prepare_inputs": ("self", "generation_batch"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_generate": ("self", "prompts"),
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_compute_loss": ("self", "model", "inputs"),
    "_set_signature_columns_if_needed": ("self",),
    "_load_best_model": ("self",),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "save_model": ("self", "output_dir", "_internal_call"),
    "create_optimizer": ("self", "model"),
    "create_scheduler": ("self", "num_training_steps", "optimizer"),
    "get_decay_parameter_names": ("self", "model"),
    "get_optimizer_cls_and_kwargs": ("args", "model"),
    "_get_per_token_logps_and_entropies": (
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ),
}

#: Functions that are called, by module, with the parameters that are relied on, in order.
FUNCTIONS = {
    "trl.models.utils": {
        "disable_gradient_checkpointing": ("model", "gradient_checkpointing_kwargs"),
        "prepare_deepspeed": ("model", "accelerator"),
        "prepare_fsdp": ("model", "accelerator"),
    },
    "trl.trainer.grpo_trainer": {
        "shuffle_sequence_dict": ("seq_dict",),
        "split_pixel_values_by_grid": ("batch",),
        "split_tensor_dict": ("tensor_dict", "num_chunks"),
        "unsplit_pixel_values_by_grid": ("batch",),
    },
    "trl.trainer.utils": {
        "add_fused_lm_head": ("model", "temperature", "cast_lm_head_to_fp32"),
        "create_model_from_path": ("model_id",),
        "disable_dropout_in_model": ("model",),
        "get_config_model_id": ("config",),
        "nanstd": ("tensor",),
        "is_async_callable": ("func",),
        "use_adapter": ("model", "adapter_name"),
    },
}

#: Attributes that GRPOTrainer's constructor must set.
ATTRIBUTES = (
    "_buffered_inputs",
    "_logs",
    "_metrics",
    "_pending_extra_logs",
    "_pending_metrics",
    "_step",
    "_tokenizer",
    "aux_loss_enabled",
    "eos_token_ids",
    "generation_config",
    "generation_kwargs",
    "max_completion_length",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "pad_to_multiple_of",
    "ref_model",
    "reward_func_names",
    "reward_funcs",
    "reward_processing_classes",
    "reward_weights",
    "router_aux_loss_coef",
    "shuffle_dataset",
    "temperature",
    "use_vllm",
    "vllm_generation",
)

#: Parameters of GRPOTrainer's constructor, which VariantTrainer passes on by name.
CONSTRUCTOR = (
    "model",
    "reward_funcs",
    "args",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "reward_processing_classes",
    "callbacks",
    "optimizers",
    "quantization_config",
    "peft_config",
    "tools",
    "rollout_func",
    "environment_factory",
)


def check_trl(trainer: type = trl.GRPOTrainer, installed: str | None = None) -> None:
    """Raise a `VariantError` if the installed TRL is not the one that this package was written for.

    Args:
        trainer: The class to look at.
        installed: Its version; the installed one by default.
    """
    installed = installed or version("trl")
    low, high = SUPPORTED
    if not SpecifierSet(f">={low},<{high}").contains(installed, prereleases=True):
        raise VariantError(
            f"trl {installed} is installed; trl-variants works with trl >= {low}, < {high}. "
            f"Run: pip install 'trl>={low},<{high}'"
        )
    for name, expected in METHODS.items():
        _check(getattr(trainer, name, None), expected, f"{trainer.__name__}.{name}", installed)
    for module, functions in FUNCTIONS.items():
        for name, expected in functions.items():
            _check(getattr(importlib.import_module(module), name, None), expected, f"{module}.{name}", installed)
    found = tuple(inspect.signature(trainer.__init__).parameters)[1:]
    if found != CONSTRUCTOR:
        raise _changed(installed, f"{trainer.__name__}'s constructor takes {found}, expected {CONSTRUCTOR}")
    source = inspect.getsource(trainer.__init__)
    for name in ATTRIBUTES:
        if f"self.{name} =" not in source:
            raise _changed(installed, f"{trainer.__name__} no longer sets self.{name}")


def _check(function: Any, expected: tuple[str, ...], name: str, installed: str) -> None:
    if function is None:
        raise _changed(installed, f"{name} is gone")
    found = tuple(inspect.signature(function).parameters)
    if found[: len(expected)] != expected:
        raise _changed(installed, f"{name} takes {found}, expected {expected} first")


def _changed(installed: str, what: str) -> VariantError:
    return VariantError(
        f"trl {installed}: {what}. trl-variants builds on it; install the trl version that it was released for."
    )


check_trl()

#: Inputs of multimodal models, which TRL's scoring forward takes besides the tokens.
VISION_INPUTS = tuple(
    name
    for name in inspect.signature(trl.GRPOTrainer._get_per_token_logps_and_entropies).parameters
    if name not in METHODS["_get_per_token_logps_and_entropies"]
)
