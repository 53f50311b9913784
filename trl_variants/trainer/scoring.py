"""What comes into a rollout from outside: rewards, stop tokens, and an engine's log-probs; each checked."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from trl.trainer.utils import is_async_callable

from trl_variants.errors import VariantError

__all__ = ["check_engine", "check_groups", "check_prompts", "checked_rewards", "stop_tokens"]

logger = get_logger(__name__)

_STOP_KEYS = ("eos_token_id", "stop_token_ids")  # transformers', vLLM's
_LARGEST = torch.finfo(torch.float32).max  # TRL keeps rewards in float32


def checked_rewards(functions: list[Any], names: list[str]) -> tuple[list[Any], list[str]]:
    """Reward functions that check what they return, and their names.

    Args:
        functions: Reward functions and models.
        names: What TRL calls them: a partial after the function inside, which several may share.
    """
    names = [getattr(f, "__name__", name) for f, name in zip(functions, names, strict=True)]
    return [checked_reward(f, name) for f, name in zip(functions, names, strict=True)], names


def checked_reward(function: Any, name: str) -> Any:
    """Wrap a reward function so that a value that is no finite number is an error that names it.

    TRL turns None into NaN and then cannot tell it from a NaN that the function computed.

    Args:
        function: A reward function, sync or async; a model is returned as it is.
        name: Its name, for the message.
    """
    if isinstance(function, nn.Module):
        return function

    def check(values: Any) -> list[float | None]:
        if not isinstance(values, Iterable):
            raise VariantError(
                f"reward function '{name}' returned {type(values).__name__}; it must return a list with one number or "
                "None per completion."
            )
        return [_number(value, index, name) for index, value in enumerate(values)]

    if is_async_callable(function):

        @functools.wraps(function)
        async def checked_async(*args: Any, **kwargs: Any) -> list[float | None]:
            return check(await function(*args, **kwargs))

        return checked_async

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> list[float | None]:
        return check(function(*args, **kwargs))

    return checked


def _number(value: Any, index: int, name: str) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text is no number, even if it reads like one")
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise VariantError(
            f"reward function '{name}' returned {value!r} for completion {index}; a reward must be a number or None."
        ) from error
    if not math.isfinite(number) or abs(number) > _LARGEST:
        raise VariantError(
            f"reward function '{name}' returned {number} for completion {index}; a reward must be finite, or None for "
            "a completion that it does not score."
        )
    return number


def stop_tokens(eos_token_ids: list[int], generation_kwargs: dict[str, Any] | None) -> list[int]:
    """Every token that ends a completion: the model's own, and those of ``generation_kwargs``."""
    extra = generation_kwargs or {}
    given = [ids if isinstance(ids, (list, tuple)) else [ids] for ids in map(extra.get, _STOP_KEYS) if ids is not None]
    return list(dict.fromkeys([*eos_token_ids, *(i for ids in given for i in ids)]))


def check_groups(rows: int, generations: int) -> None:
    """Raise a `VariantError` where a batch holds no whole groups, as an evaluation that the config did not plan may."""
    if rows % generations:
        raise VariantError(
            f"A batch of {rows} completions holds no whole number of groups of {generations}. Set "
            "num_generations_eval: 1, or make per_device_eval_batch_size x processes a multiple of it."
        )


def check_prompts(trainer: Any) -> None:
    """Raise a `VariantError` where a dataset is smaller than one rollout: the loader drops what is not whole."""
    dataset, args = trainer.train_dataset, trainer.args
    prompts = args.generation_batch_size // args.num_generations
    if hasattr(dataset, "__len__") and len(dataset) < prompts:
        raise VariantError(
            f"The training dataset has {len(dataset)} prompts, and one rollout takes {prompts} "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}). Lower "
            "per_device_train_batch_size or steps_per_generation, or raise num_generations."
        )


def check_engine(trainer: Any) -> None:
    """Warn where a vLLM server returns log-probs that a component cannot be right with, as TRL does."""
    args = trainer.args
    reads = any("sampling_log_probs" in bound.info.inputs for bound in trainer.recipe.components)
    if not (reads and args.use_vllm and args.vllm_mode == "server" and trainer.accelerator.is_main_process):
        return
    mode = trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        logger.warning(
            f"The vLLM server runs with --logprobs-mode {mode}, which biases what is computed from its log-probs. "
            "Restart it with --logprobs-mode processed_logprobs, or set variant_overrides: {token_weight: none}."
        )
