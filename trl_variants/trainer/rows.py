"""Rows of a generation batch: taken, joined, trimmed and gathered, with their padding kept right.

``Rows`` is a dict like the one that TRL buffers: tensors and lists with the rows first. Prompts (``prompt_ids``,
``prompt_mask``) are padded on the left, everything else of a width on the right. Nothing here changes its input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional

from trl_variants.errors import VariantError

__all__ = ["Rows", "count", "gather", "join", "move", "old_log_probs", "own_old_log_probs", "put", "take", "trim"]

Rows = dict[str, Any]

_PROMPTS = ("prompt_ids", "prompt_mask")
_IDS = ("prompt_ids", "completion_ids")
#: Entries of one value per completion token.
_PER_TOKEN = ("completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps", "carried_log_probs")
#: What stands in rows that lack an entry which others have.
_ABSENT = {
    "tool_mask": 1,
    "sampling_per_token_logps": math.nan,
    "carried": False,
    "carried_log_probs": 0.0,
    "age": 0,
    "greedy_rewards": math.nan,
}


def count(rows: Rows) -> int:
    """How many rows there are."""
    return len(next(iter(rows.values())))


def take(rows: Rows, index: Sequence[int]) -> Rows:
    """The rows of an index, in its order.

    Args:
        rows: Tensors (rows, ...) and lists of one item per row; everything else is passed on.
        index: Which rows.
    """
    where = torch.tensor(list(index), dtype=torch.long)

    def taken(value: Any) -> Any:
        if isinstance(value, list):
            return [value[i] for i in where.tolist()]
        return value[where.to(value.device)] if isinstance(value, Tensor) and value.dim() else value

    return {name: taken(value) for name, value in rows.items()}


def put(into: Tensor, index: Sequence[int], values: Tensor) -> None:
    """Write (rows, width) or (rows,) values into some rows of a tensor that is as wide or wider."""
    where = torch.tensor(list(index), device=into.device)
    if into.dim() == 1:
        into[where] = values
    else:
        into[where, : values.shape[1]] = values


def join(parts: Sequence[Rows], pad_id: int) -> Rows:
    """All rows of several dicts, padded to one width.

    Args:
        parts: At least one; tensors are (rows,) or (rows, width) on one device.
        pad_id: The padding token.

    Returns:
        The rows in order. Where a part lacks an entry that only some rollouts have (a tool mask, an engine's
        log-probs, old log-probs of its own), the value that means "none" stands.

    Raises:
        VariantError: A part lacks an entry that every rollout has.
    """
    examples = {name: value for part in parts for name, value in part.items()}
    columns = {
        name: [part[name] if name in part else _absent(name, example, part) for part in parts]
        for name, example in examples.items()
    }
    return {name: _joined(values, name, pad_id) for name, values in columns.items()}


def trim(rows: Rows, multiple: int | None = None) -> Rows:
    """The rows without the columns that are padding in all of them.

    Args:
        rows: With ``prompt_mask`` (rows, P) and ``completion_mask`` (rows, T).
        multiple: Widths stay multiples of this (TRL's ``pad_to_multiple_of``).
    """
    width = {name: rows[f"{name}_mask"].shape[1] for name in ("prompt", "completion")}
    keep = {}
    for name in width:
        used = max(int(rows[f"{name}_mask"].sum(1).max()), 1)
        keep[name] = min(width[name], math.ceil(used / (multiple or 1)) * (multiple or 1))
    trimmed = dict(rows)
    for name, value in rows.items():
        if name in _PROMPTS:
            trimmed[name] = value[:, width["prompt"] - keep["prompt"] :]
        elif isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == width["completion"]:
            trimmed[name] = value[:, : keep["completion"]]
    return trimmed


def gather(rows: Rows, accelerator: Accelerator, pad_id: int) -> Rows:
    """The rows of all processes in order, padded to one width; every process must have the same entries.

    Args:
        rows: Tensors (rows,) or (rows, width) of this process.
        accelerator: Gathers.
        pad_id: The padding token.
    """
    if accelerator.num_processes == 1:
        return dict(rows)
    gathered = {}
    for name, value in rows.items():
        whole = value.long() if value.dtype is torch.bool else value
        if whole.dim() > 1:
            whole = accelerator.pad_across_processes(
                whole, dim=1, pad_index=_padding(name, pad_id), pad_first=name in _PROMPTS
            )
        gathered[name] = accelerator.gather(whole).to(value.dtype)
    return gathered


def move(rows: Rows, device: Any) -> Rows:
    """The rows with their tensors on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in rows.items()}


def own_old_log_probs(rows: Rows, log_probs: Tensor) -> Tensor:
    """Old log-probs of rows of which some were carried from an earlier rollout, and have their own.

    Args:
        rows: With ``carried`` (rows,) bool and ``carried_log_probs`` (rows, T) where any is carried.
        log_probs: (rows, T) for the others.

    Returns:
        (rows, T).
    """
    if "carried" not in rows:
        return log_probs
    return torch.where(rows["carried"][:, None], rows["carried_log_probs"], log_probs)


def old_log_probs(rows: Rows, now: Tensor) -> Tensor:
    """Old log-probs of a micro-batch: those it holds, else the policy's of now, which has not moved since the rollout.

    Args:
        rows: With ``old_per_token_logps`` (rows, T) or None, and what was carried.
        now: (rows, T), detached.
    """
    given: Tensor | None = rows.get("old_per_token_logps")
    return own_old_log_probs(rows, now) if given is None else given


def _padding(name: str, pad_id: int) -> float:
    return pad_id if name in _IDS else int(name == "tool_mask")


def _absent(name: str, example: Any, rows: Rows) -> Any:
    """What stands for an entry that these rows lack, and that others have like ``example``."""
    if isinstance(example, list):
        return [None] * count(rows)
    if name not in _ABSENT:
        raise VariantError(f"Rows with and without {name} cannot be joined.")
    shape = rows["completion_ids"].shape if name in _PER_TOKEN else (count(rows),)
    return example.new_full(shape, _ABSENT[name])


def _joined(values: list[Any], name: str, pad_id: int) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if not isinstance(values[0], Tensor) or not values[0].dim():  # what all rows share
        return values[0]
    if values[0].dim() == 1:
        return torch.cat(values)
    width = max(value.shape[1] for value in values)
    first = name in _PROMPTS
    padded = [
        functional.pad(value, (gap, 0) if first else (0, gap), value=_padding(name, pad_id))
        for value in values
        for gap in (width - value.shape[1],)
    ]
    return torch.cat(padded)
