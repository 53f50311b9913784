"""Joining the metrics of micro-batches and ranks into one number per optimizer step."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from trl_variants.data import Batch, Metric
from trl_variants.metrics import Observed, of_step
from trl_variants.recipe import Recipe

__all__ = ["Monitor", "sampling_metrics"]


@torch.no_grad()
def sampling_metrics(batch: Batch, recipe: Recipe) -> dict[str, Metric]:
    """How far the generation engine is from the trainer, and what corrects for it, under TRL's names.

    Args:
        batch: The micro-batch.
        recipe: Holds the correction and its parameters.

    Returns:
        Nothing where the engine returned no log-probs.
    """
    if batch.sampling_log_probs is None:
        return {}
    gap = (batch.old_log_probs - batch.sampling_log_probs).abs()
    out = _spread("sampling/sampling_logp_difference", gap[batch.mask & ~gap.isnan()], ("mean", "max"))
    for bound in recipe.token_weights:
        if bound.name == "rollout_correction":
            own = {name: bound.parameters[name] for name in bound.info.parameters}
            weight = bound.info.function(batch.old_log_probs, batch.mask, batch.sampling_log_probs, **own)
            counted = batch.mask if weight.shape == batch.mask.shape else batch.mask.any(1, keepdim=True)
            out |= _spread("sampling/importance_sampling_ratio", weight[counted], ("min", "mean", "max"))
    return out


def _spread(name: str, values: Tensor, what: tuple[str, ...]) -> dict[str, Metric]:
    count = torch.tensor(len(values), device=values.device)
    empty = {"min": torch.inf, "max": -torch.inf}
    extremes = {
        kind: Metric(getattr(values, kind)() if len(values) else values.new_tensor(empty[kind]), count, kind)
        for kind in ("min", "max")
    }
    metrics = {"mean": Metric(values.sum(), count), **extremes}
    return {f"{name}/{kind}": metrics[kind] for kind in what}


class Monitor:
    """Collects metrics over micro-batches, and joins them over ranks once per step.

    Sums and counts are joined, never means: a micro-batch or a rank with few tokens weighs as few.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._observed: list[Observed] = []
        self._parts: dict[str, list[Metric]] = {}

    def add(self, observed: Observed, metrics: dict[str, Metric]) -> None:
        """Take what one micro-batch has left, and further metrics of it."""
        self._observed.append(observed)
        for name, metric in metrics.items():
            self._parts.setdefault(name, []).append(metric)

    def flush(self) -> dict[str, float]:
        """Join what was collected on all ranks, and start anew. NaN where nothing was counted."""
        parts, self._parts = self._parts, {}
        observed, self._observed = self._observed, []
        parts |= {name: [metric] for name, metric in of_step(observed).items()}
        return {
            **self._sums({name: p for name, p in parts.items() if p[0].reduce == "mean"}),
            **self._extremes({name: p for name, p in parts.items() if p[0].reduce != "mean"}),
        }

    def _sums(self, parts: dict[str, list[Metric]]) -> dict[str, float]:
        if not parts:
            return {}
        every = [metric for metrics in parts.values() for metric in metrics]
        mine = torch.stack([self._stack([m.total for m in every]), self._stack([m.count for m in every])])
        joined = iter(self._accelerator.reduce(mine, reduction="sum").T.tolist())
        means = {}
        for name, metrics in parts.items():
            total, count = map(sum, zip(*(next(joined) for _ in metrics), strict=True))
            means[name] = total / count if count else float("nan")
        return means

    def _extremes(self, parts: dict[str, list[Metric]]) -> dict[str, float]:
        if not parts:
            return {}
        mine = self._stack([metric.total for p in parts.values() for metric in p])
        joined = iter(self._accelerator.gather(mine[None]).T.tolist())  # (metrics, ranks)
        pick = {"min": min, "max": max}
        values = {name: pick[p[0].reduce](v for _ in p for v in next(joined)) for name, p in parts.items()}
        return {name: v if abs(v) != torch.inf else float("nan") for name, v in values.items()}

    def _stack(self, values: list[torch.Tensor]) -> torch.Tensor:
        device = self._accelerator.device
        # Devices without float64 (MPS) get float32.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return torch.stack([value.to(device, dtype) for value in values])
