"""What tests of components are made of: rollouts and batches from short lists, and the contract to hold them to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trl_variants.conformance import NonConformance, Verdict, check_component, check_plugin, check_variant
from trl_variants.conformance.ranks import on_ranks
from trl_variants.conformance.rewards import check_reward_function
from trl_variants.conformance.training import train_config
from trl_variants.data import Batch, Rollout, Totals

__all__ = [
    "NonConformance",
    "Verdict",
    "check_component",
    "check_plugin",
    "check_reward_function",
    "check_variant",
    "make_batch",
    "make_rollout",
    "on_ranks",
    "train_config",
]

Values = Tensor | Sequence[Any]


def make_rollout(
    rewards: Values,
    *,
    group_size: int | None = None,
    group_ids: Values | None = None,
    lengths: Values | None = None,
    mask: Values | None = None,
    max_length: int | None = None,
    scored: Values | None = None,
    **tensors: Any,
) -> Rollout:
    """Build a `Rollout` from lists or tensors.

    Args:
        rewards: (N,); the dtype is kept, lists become float64.
        group_size: Completions per prompt, in order; all of them by default.
        group_ids: (N,), instead of ``group_size``.
        lengths: (N,) tokens of each completion; the width of ``mask``, else 1.
        mask: (N, T); by default what ``lengths`` say.
        max_length: The length limit; the width of the mask by default.
        scored: (N,) bool; all by default.
        **tensors: Any other field of `Rollout`.

    Example:
        >>> make_rollout([1.0, 0.0], lengths=[2, 3]).mask.sum().item()
        5
    """
    rewards = _tensor(rewards)
    rows = len(rewards)
    if mask is None:
        lengths = torch.ones(rows, dtype=torch.long) if lengths is None else torch.as_tensor(lengths)
        width = max([int(lengths.max()), *(_width(v) for v in tensors.values())])
        mask = torch.arange(width)[None] < lengths[:, None]
    mask = torch.as_tensor(mask).bool()
    lengths = mask.sum(1) if lengths is None else torch.as_tensor(lengths)
    if group_ids is None:
        group_ids = torch.arange(rows) // (group_size or rows)
    fields: dict[str, Any] = {
        "rewards_per_func": rewards[:, None],
        "reward_weights": torch.ones(1, dtype=rewards.dtype),
        "reward_names": ("reward",),
        "truncated": torch.zeros(rows, dtype=torch.bool),
        "has_eos": torch.ones(rows, dtype=torch.bool),
        **{name: value if name == "reward_names" else _tensor(value) for name, value in tensors.items()},
    }
    return Rollout(
        rewards=rewards,
        scored=torch.ones(rows, dtype=torch.bool) if scored is None else torch.as_tensor(scored),
        group_ids=torch.as_tensor(group_ids),
        mask=mask,
        lengths=lengths,
        max_length=mask.shape[1] if max_length is None else max_length,
        **fields,
    )


def make_batch(
    *,
    advantages: Values,
    log_probs: Values | None = None,
    old_log_probs: Values | None = None,
    mask: Values | None = None,
    lengths: Values | None = None,
    max_length: int | None = None,
    **tensors: Any,
) -> Batch:
    """Build a `Batch` that is one whole optimizer step, from lists or tensors.

    Args:
        advantages: (B,), (B, 1) or (B, T); the dtype is kept, lists become float64.
        log_probs: (B, T); by default -1 everywhere.
        old_log_probs: (B, T); by default the current ones, detached.
        mask: (B, T); by default what ``lengths`` say, else all of it.
        lengths: (B,) tokens of each completion.
        max_length: The length limit; the width of the mask by default.
        **tensors: Any other field of `Batch`.

    Example:
        >>> make_batch(advantages=[1.0, -1.0], lengths=[1, 3]).totals.tokens
        4.0
    """
    advantages = _tensor(advantages)
    given = {"log_probs": log_probs, "old_log_probs": old_log_probs, **tensors}
    values: dict[str, Any] = {
        name: _tensor(value) for name, value in given.items() if value is not None and name not in _PLAIN
    }
    plain = {name: given[name] for name in _PLAIN if name in given}
    if mask is None:
        width = max([1, *(_width(v) for v in (*values.values(), advantages))])
        rows = len(advantages)
        lengths = torch.full((rows,), width) if lengths is None else torch.as_tensor(lengths)
        mask = torch.arange(max(width, int(lengths.max())))[None] < lengths[:, None]
    mask = torch.as_tensor(mask).bool()
    values.setdefault("log_probs", torch.full(mask.shape, -1.0, dtype=advantages.dtype))
    plain.setdefault("totals", Totals.of(mask, max_length))
    return Batch(advantages=advantages, mask=mask, **values, **plain)


#: Fields of a batch that are no tensors.
_PLAIN = ("totals", "step")


def _tensor(value: Values) -> Tensor:
    """A tensor as it is; lists of floats become float64."""
    if isinstance(value, Tensor):
        return value
    tensor = torch.tensor(value)
    # From the list again: 0.1 by way of float32 is another number.
    return torch.tensor(value, dtype=torch.float64) if tensor.is_floating_point() else tensor


def _width(value: Any) -> int:
    shape = value.shape if isinstance(value, Tensor) else torch.tensor(value).shape if isinstance(value, list) else ()
    return shape[1] if len(shape) == 2 else 1
