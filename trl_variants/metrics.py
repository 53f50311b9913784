"""What a recipe logs. Names are TRL's where TRL has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trl_variants.components.kl import k3
from trl_variants.components.masked import group_table, is_constant, masked_sum, select
from trl_variants.components.regularizers import value_clipped, value_loss
from trl_variants.data import Batch, ClipResult, Metric, Rollout

if TYPE_CHECKING:
    from trl_variants.binding import Workspace

__all__ = ["measured_kl", "of_loss", "of_rollout"]


def measured_kl(kl: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean KL per policy token, and mean over completions of the KL summed over tokens."""
    total = masked_sum(kl, mask)
    return float(total / mask.sum().clamp(min=1)), float(total / max(len(kl), 1))


@torch.no_grad()
def of_rollout(x: Workspace, rollout: Rollout, returns: Tensor | None = None) -> dict[str, Metric]:
    """Metrics of the rollout phase.

    ``frac_reward_zero_std``: share of completions in groups of equal rewards; ``keep_ratio``: share that the filters
    keep; ``reward_shaped``: the reward that the estimator saw; ``advantages/group_spread``: mean over groups of the
    standard deviation of advantages inside the group; ``kl`` and ``kl/k3`` where KL is measured at the rollout; with a
    critic ``values/mean``, ``returns/mean``, ``returns/std`` and ``explained_variance``.
    """
    advantages = x["advantages"]
    if advantages.dim() == 2:
        advantages = masked_sum(advantages, rollout.mask, dim=1) / rollout.mask.sum(1).clamp(min=1)
    rewards, row = group_table(rollout.rewards, rollout.scored, rollout.group_ids)
    spread, _ = group_table(advantages, rollout.scored, rollout.group_ids)
    spread = (spread - spread.nanmean(1, keepdim=True)).square().nanmean(1).sqrt()
    out = {
        "frac_reward_zero_std": _mean(is_constant(rewards)[row].float()),
        "keep_ratio": _mean(x["keep"].float()),
        "reward_shaped": _mean(x["rewards"], rollout.scored),
        "advantages/group_spread": _mean(spread, ~spread.isnan()),
    }
    if x["kl"] is not None:
        out |= _kl(x, rollout.mask)
    if returns is not None and rollout.values is not None:
        out |= _of_values(rollout.values, returns, rollout.mask & (rollout.scored & x["keep"])[:, None])
    return out


def _of_values(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, Metric]:
    """How well the critic knew the returns of this rollout: 1 - Var(R - V) / Var(R); 1 is perfect, 0 is a constant."""
    spread, error = _variance(returns, mask), _variance(returns - values, mask)
    known = ~is_constant(returns.masked_fill(~mask, torch.nan).view(1, -1))[0] & mask.any()
    explained = 1 - error / torch.where(known, spread, 1.0)
    return {
        "values/mean": _mean(values, mask),
        "returns/mean": _mean(returns, mask),
        "returns/std": Metric(spread.sqrt(), torch.ones_like(spread)),
        "explained_variance": Metric(select(explained, known), known),
    }


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum().clamp(min=1)
    return masked_sum((x - masked_sum(x, mask) / count).square(), mask) / count


@torch.no_grad()
def of_loss(x: Workspace, batch: Batch, clip: ClipResult, terms: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Metrics of the learning phase.

    ``entropy``; ``clip_ratio/{low,high,region,dual}_mean``, ``clip_ratio/low_min`` and ``clip_ratio/high_max`` from
    what the clip rule says it clipped; ``approx_kl``, the k3 estimate of KL(old policy, policy); ``kl`` as it is
    trained, and ``kl/k3`` for monitoring; one per regularizer, and ``clip_ratio/value`` of the value loss.
    """
    assert batch.old_log_probs is not None
    tokens = _Counted.of(batch.mask)
    # What a batch holds is 0 where nothing counts.
    out = {"approx_kl": Metric(k3(batch.old_log_probs, batch.log_probs).sum(), tokens.total)}
    if batch.entropies is not None:
        out["entropy"] = Metric(batch.entropies.detach().sum(), tokens.total)
    out |= _clips(clip, tokens)
    if x["kl"] is not None:
        out |= _kl(x, batch.mask)
    out |= _value_clips(x, batch)
    named = {name if name not in out else f"regularizer/{name}": term for name, term in terms.items()}
    return out | {name: tokens.mean(term) for name, term in named.items()}


@dataclass(frozen=True)
class _Counted:
    """A mask with its counts, which several metrics share.

    Attributes:
        mask: (B, T) bool, or (B, 1) for completions.
        rows: (B,) how much counts in each row.
        total: 0-dim.
    """

    mask: Tensor
    rows: Tensor
    total: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> _Counted:
        rows = mask.sum(1)
        return cls(mask, rows, rows.sum())

    def mean(self, values: Tensor) -> Metric:
        return Metric(select(values.detach(), self.mask).sum(), self.total)


def _clips(clip: ClipResult, tokens: _Counted) -> dict[str, Metric]:
    """Shares of what the clip rule says it clipped, and the least and largest share of any completion."""
    flags = {name: where for name in ("low", "high", "dual") if (where := getattr(clip, name)) is not None}
    if not flags:
        return {}
    if len({where.shape for where in flags.values()}) > 1:
        flags = {name: where.expand_as(tokens.mask) for name, where in flags.items()}
    if "low" in flags and "high" in flags:
        flags["region"] = flags["low"] | flags["high"]
    stacked = torch.stack(list(flags.values()))
    counts = tokens if stacked.shape[1:] == tokens.mask.shape else _Counted.of(tokens.rows[:, None] > 0)
    clipped = (stacked & counts.mask).sum(2)  # (flags, B)
    totals = clipped.sum(1)
    out = {f"clip_ratio/{name}_mean": Metric(totals[i], counts.total) for i, name in enumerate(flags)}
    share, empty = clipped / counts.rows, counts.rows == 0
    for i, name in enumerate(flags):
        if name == "low":
            least = share[i].masked_fill(empty, torch.inf).amin()
            out["clip_ratio/low_min"] = Metric(least, counts.total.clamp(max=1), "min")
        if name == "high":
            most = share[i].masked_fill(empty, -torch.inf).amax()
            out["clip_ratio/high_max"] = Metric(most, counts.total.clamp(max=1), "max")
    return out


def _value_clips(x: Workspace, batch: Batch) -> dict[str, Metric]:
    """Share of the tokens where the clip of a value loss takes the gradient away."""
    for bound, _ in x.outputs:
        if bound.info.function is value_loss:
            where = value_clipped(x["values"], x["old_values"], x["returns"], clip=bound.parameters["clip"])
            mask = batch.mask if batch.scored is None else batch.mask & batch.scored[:, None]
            return {"clip_ratio/value": _mean(where.float(), mask)}
    return {}


def _kl(x: Workspace, mask: Tensor) -> dict[str, Metric]:
    kl = _mean(x["kl"], mask)
    if any(bound.info.function is k3 for bound, _ in x.outputs):
        return {"kl": kl, "kl/k3": kl}
    return {"kl": kl, "kl/k3": _mean(k3(x["log_probs"], x["ref_log_probs"]), mask)}


def _mean(values: Tensor, mask: Tensor | None = None) -> Metric:
    values = values.detach()
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    return Metric(select(values, mask).sum(), mask.sum())
