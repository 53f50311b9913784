"""Joining the metrics of micro-batches and ranks into one number per optimizer step."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from trl_variants.data import Metric

__all__ = ["Monitor"]


class Monitor:
    """Collects metrics over micro-batches, and joins them over ranks once per step.

    Sums and counts are joined, never means: a micro-batch or a rank with few tokens weighs as few.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._parts: dict[str, list[Metric]] = {}

    def add(self, metrics: dict[str, Metric]) -> None:
        """Take the metrics of one micro-batch."""
        for name, metric in metrics.items():
            self._parts.setdefault(name, []).append(metric)

    def flush(self) -> dict[str, float]:
        """Join what was collected on all ranks, and start anew. NaN where nothing was counted."""
        parts, self._parts = self._parts, {}
        return {
            **self._sums({name: p for name, p in parts.items() if p[0].reduce == "mean"}),
            **self._extremes({name: p for name, p in parts.items() if p[0].reduce != "mean"}),
        }

    def _sums(self, parts: dict[str, list[Metric]]) -> dict[str, float]:
        if not parts:
            return {}
        rows = [[sum(m.total.double() for m in p), sum(m.count.double() for m in p)] for p in parts.values()]
        sums = self._accelerator.reduce(self._stack(rows), reduction="sum")
        return {
            name: (total / count if count else float("nan"))
            for name, (total, count) in zip(parts, sums.tolist(), strict=True)
        }

    def _extremes(self, parts: dict[str, list[Metric]]) -> dict[str, float]:
        if not parts:
            return {}
        pick = {"min": torch.amin, "max": torch.amax}
        rows = [[pick[p[0].reduce](torch.stack([m.total.double() for m in p]), 0)] for p in parts.values()]
        ranks = self._accelerator.gather(self._stack(rows).T.contiguous())  # (ranks, metrics)
        values = [pick[p[0].reduce](ranks[:, i], 0).item() for i, p in enumerate(parts.values())]
        return {name: v if abs(v) != torch.inf else float("nan") for name, v in zip(parts, values, strict=True)}

    def _stack(self, rows: list[list[torch.Tensor]]) -> torch.Tensor:
        device = self._accelerator.device
        # Devices without float64 (MPS) get float32.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return torch.stack([torch.stack([value.to(device) for value in row]) for row in rows]).to(dtype)
