"""Rows of a generation batch or a micro-batch, counts of an optimizer step, and rows of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from trl_variants.data import Totals

__all__ = ["gather_rows", "join_rows", "local_rows", "put_rows", "step_totals", "take_rows"]

_PROMPT = ("prompt_ids", "prompt_mask")


def take_rows(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Some rows, without the padding that none of them needs: on a prompt's left, on a completion's right.

    Args:
        batch: Tensors and lists with a row for each completion, and what all rows share.
        rows: Their numbers.
    """
    count, width = batch["completion_ids"].shape
    index = torch.tensor(list(rows), device=batch["completion_ids"].device)
    prompt = max(1, int(batch["prompt_mask"][index].sum(1).max()))
    completion = max(1, int(batch["completion_mask"][index].sum(1).max()))

    def taken(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [value[row] for row in rows]
        if not isinstance(value, Tensor) or not value.dim():
            return value
        assert len(value) == count, name
        value = value[index]
        if name in _PROMPT:
            return value[:, -prompt:]
        return value[:, :completion] if value.dim() > 1 and value.shape[1] == width else value

    return {name: taken(name, value) for name, value in batch.items()}


def join_rows(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows of several micro-batches, padded to one width."""
    prompt = max(batch["prompt_ids"].shape[1] for batch in batches)
    completion = max(batch["completion_ids"].shape[1] for batch in batches)

    def padded(name: str, value: Tensor, width: int) -> Tensor:
        if name in _PROMPT:
            return nn.functional.pad(value, (prompt - value.shape[1], 0))
        per_token = value.dim() > 1 and value.shape[1] == width
        return nn.functional.pad(value, (0, completion - width)) if per_token else value

    def joined(name: str) -> Any:
        first = batches[0][name]
        if isinstance(first, list):
            return [item for batch in batches for item in batch[name]]
        if not isinstance(first, Tensor) or not first.dim():
            return first
        return torch.cat([padded(name, batch[name], batch["completion_ids"].shape[1]) for batch in batches])

    return {name: joined(name) for name in batches[0]}


def put_rows(into: Tensor, rows: Sequence[int], values: Tensor) -> None:
    """Write (R, T') or (R,) values of some rows into an (N, T) or (N,) tensor."""
    index = torch.tensor(list(rows), device=into.device)
    if into.dim() == 1:
        into[index] = values
    else:
        into[index, : values.shape[1]] = values


def step_totals(steps: list[list[dict[str, Any]]], max_length: int, accelerator: Accelerator) -> list[Totals]:
    """Counts of each optimizer step over its micro-batches and all ranks, in one reduction.

    Args:
        steps: Micro-batches of this process, by optimizer step.
        max_length: The length limit of a completion.
        accelerator: Reduces over ranks.
    """
    counts = torch.tensor(
        [
            [
                sum(float(batch["loss_mask"].sum()) for batch in step),
                sum(float(batch["loss_mask"].any(1).sum()) for batch in step),
                sum(float(len(batch["loss_mask"])) for batch in step),
                float(len(step)),
            ]
            for step in steps
        ],
        device=accelerator.device,
    )
    return [Totals(*row, max_length=max_length) for row in accelerator.reduce(counts, reduction="sum").tolist()]


def gather_rows(tensor: Tensor, accelerator: Accelerator) -> Tensor:
    """Rows of all processes, padded with 0 to one width."""
    if accelerator.num_processes == 1:
        return tensor
    kind = tensor.dtype
    tensor = tensor.long() if kind is torch.bool else tensor
    if tensor.dim() > 1:
        tensor = accelerator.pad_across_processes(tensor, dim=1)
    return accelerator.gather(tensor).to(kind)


def local_rows(tensor: Tensor, like: Tensor, accelerator: Accelerator) -> Tensor:
    """This process's rows of what all processes share, at the width of its own completions."""
    rows, width = like.shape
    mine = tensor[accelerator.process_index * rows : (accelerator.process_index + 1) * rows]
    return mine if mine.dim() == 1 else mine[:, :width]
