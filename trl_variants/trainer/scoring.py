"""Rewards as TRL computes them, and the `Rollout` that a recipe takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from trl.trainer.utils import is_async_callable

from trl_variants.data import Rollout
from trl_variants.errors import VariantError

__all__ = ["build_rollout", "check_engine", "checked_reward", "loss_mask", "stop_tokens"]

logger = get_logger(__name__)

_STOP_KEYS = ("eos_token_id", "stop_token_ids")  # transformers', vLLM's
_LARGEST = torch.finfo(torch.float32).max  # TRL keeps rewards in float32


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


def build_rollout(
    output: dict[str, Any],
    rewards_per_func: Tensor,
    *,
    reward_weights: Tensor,
    reward_names: list[str],
    stop_ids: list[int],
    pad_id: int,
    generations: int,
    max_length: int,
    gather: Callable[[Tensor], Tensor],
) -> Rollout:
    """Build the `Rollout` of all processes from what TRL generated on this one.

    Args:
        output: TRL's generation batch of this process.
        rewards_per_func: (N, F) of all processes, NaN where a function returned None.
        reward_weights: (F,).
        reward_names: The F names.
        stop_ids: Every token that ends a completion.
        pad_id: The padding token, which also counts as an end for TRL's ``clipped_ratio``.
        generations: Completions per prompt.
        max_length: The length limit.
        gather: Collects rows of all processes, padding them to one width.
    """
    completion_mask = output["completion_mask"].bool()
    lengths = completion_mask.sum(1)
    last = output["completion_ids"].gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
    has_eos = torch.isin(last, torch.tensor(stop_ids, device=last.device)) & (lengths > 0)
    weights = reward_weights.to(rewards_per_func)
    rows = len(rewards_per_func)
    tensors = {
        field: gather(output[key])
        for field, key in (
            ("log_probs", "rollout_log_probs"),
            ("ref_log_probs", "ref_per_token_logps"),
            ("sampling_log_probs", "sampling_per_token_logps"),
        )
        if key in output
    }
    return Rollout(
        rewards=(rewards_per_func * weights).nansum(1),
        scored=~rewards_per_func.isnan().all(1),
        rewards_per_func=rewards_per_func,
        reward_weights=weights,
        reward_names=tuple(reward_names),
        # TRL lays completions of a prompt side by side, over the processes in order.
        group_ids=torch.arange(rows, device=rewards_per_func.device) // generations,
        mask=gather(loss_mask(output)),
        lengths=gather(lengths),
        truncated=gather(~has_eos & (last != pad_id)),
        has_eos=gather(has_eos),
        max_length=max_length,
        **tensors,
    )


def loss_mask(output: dict[str, Any]) -> Tensor:
    """(·, T) bool: tokens of the policy; neither padding nor what a tool or environment wrote."""
    mask = output["completion_mask"].bool()
    return mask & output["tool_mask"].bool() if "tool_mask" in output else mask
