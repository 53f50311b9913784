"""What a recipe logs. Names are TRL's where TRL has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trl_variants.components.kl import k3
from trl_variants.components.masked import counted, group_table, is_constant, masked_sum, select
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
    out = {"approx_kl": _mean(k3(batch.old_log_probs, batch.log_probs), batch.mask)}
    if batch.entropies is not None:
        out["entropy"] = _mean(batch.entropies, batch.mask)
    clipped = {"low": clip.low, "high": clip.high, "dual": clip.dual}
    if clip.low is not None and clip.high is not None:
        clipped["region"] = clip.low | clip.high
    for name, where in clipped.items():
        if where is not None:
            out[f"clip_ratio/{name}_mean"] = _mean(where.float(), counted(where, batch.mask))
    for name, reduce in (("low", "min"), ("high", "max")):
        if clipped[name] is not None:
            out[f"clip_ratio/{name}_{reduce}"] = _extreme(clipped[name], batch.mask, reduce)
    if x["kl"] is not None:
        out |= _kl(x, batch.mask)
    out |= _value_clips(x, batch)
    named = {name if name not in out else f"regularizer/{name}": term for name, term in terms.items()}
    return out | {name: _mean(term, batch.mask) for name, term in named.items()}


def _value_clips(x: Workspace, batch: Batch) -> dict[str, Metric]:
    """Share of the tokens where the clip of a value loss takes the gradient away."""
    for bound, _ in x.outputs:
        if bound.info.function is value_loss:
            where = value_clipped(x["values"], x["old_values"], x["returns"], clip=bound.parameters["clip"])
            mask = batch.mask if batch.scored is None else batch.mask & batch.scored[:, None]
            return {"clip_ratio/value": _mean(where.float(), mask)}
    return {}


def _kl(x: Workspace, mask: Tensor) -> dict[str, Metric]:
    return {"kl": _mean(x["kl"], mask), "kl/k3": _mean(k3(x["log_probs"], x["ref_log_probs"]), mask)}


def _mean(values: Tensor, mask: Tensor | None = None) -> Metric:
    values = values.detach()
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    return Metric(select(values, mask).sum(), mask.sum())


def _extreme(where: Tensor | None, mask: Tensor, reduce: str) -> Metric:
    """The least or largest clipped share of any completion."""
    assert where is not None
    valid = counted(where, mask)
    share = masked_sum(where.float(), valid, dim=1) / valid.sum(1).clamp(min=1)
    share = share[valid.any(1)]
    empty = len(share) == 0
    neutral = torch.inf if reduce == "min" else -torch.inf
    value = share.new_tensor(neutral) if empty else (share.min() if reduce == "min" else share.max())
    return Metric(value, torch.tensor(0 if empty else 1), "min" if reduce == "min" else "max")
