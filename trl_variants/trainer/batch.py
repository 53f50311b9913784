"""Counts of an optimizer step, and rows of all processes."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from trl_variants.data import Totals

__all__ = ["gather_ragged", "gather_rows", "local_rows", "step_totals"]


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


def gather_ragged(tensor: Tensor, accelerator: Accelerator) -> Tensor:
    """Concatenate (rows, ...) tensors of all processes; they may differ in the number of rows."""
    if accelerator.num_processes == 1:
        return tensor
    rows = accelerator.gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    if len(set(rows)) == 1:
        return accelerator.gather(tensor)
    padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = accelerator.gather(padded).split(max(rows))
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def local_rows(tensor: Tensor, like: Tensor, accelerator: Accelerator) -> Tensor:
    """This process's rows of what all processes share, at the width of its own completions."""
    rows, width = like.shape
    mine = tensor[accelerator.process_index * rows : (accelerator.process_index + 1) * rows]
    return mine if mine.dim() == 1 else mine[:, :width]
