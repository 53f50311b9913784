"""What a recipe logs. Names are TRL's where TRL has one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

__all__ = ["Observed", "measured_kl", "observe", "of_rollout", "of_step"]


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
        out["kl"] = _mean(x["kl"], rollout.mask)
        out["kl/k3"] = _mean(k3(x["log_probs"], x["ref_log_probs"]), rollout.mask)
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


@dataclass(frozen=True)
class Observed:
    """What one micro-batch leaves for the metrics of its optimizer step, detached.

    Attributes:
        mask: (B, T) bool, True where a token counts.
        values: (B, T) by name: what metrics are computed from.
        terms: (B, T) by name: those of the regularizers.
        weights: (B, T) by name: those of the token weights.
        clipped: (B, T) or (B, 1) bool by name: what the clip rule says it clipped.
    """

    mask: Tensor
    values: Mapping[str, Tensor]
    terms: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    clipped: Mapping[str, Tensor]


def observe(x: Workspace, batch: Batch, clip: ClipResult, terms: Mapping[str, Tensor]) -> Observed:
    """Keep what `of_step` needs of a micro-batch; nothing is computed yet."""
    values = {
        "log_probs": batch.log_probs,
        "old_log_probs": batch.old_log_probs,
        "entropies": batch.entropies,
        "kl": x["kl"],
    }
    weights = {}
    for bound, result in x.outputs:
        if bound.slot == "token_weight" and result is not None:
            weights[bound.name] = result.expand_as(batch.mask)
        if bound.slot == "kl_estimator" and bound.info.function is not k3:
            values["ref_log_probs"] = batch.ref_log_probs
        if bound.info.function is value_loss:
            clip_of_values = bound.parameters["clip"]
            values["value_clipped"] = value_clipped(x["values"], x["old_values"], x["returns"], clip=clip_of_values)
            values["valued"] = batch.mask if batch.scored is None else batch.mask & batch.scored[:, None]
    flags = {name: where for name in ("low", "high", "dual") if (where := getattr(clip, name)) is not None}
    if len({where.shape for where in flags.values()}) > 1:
        flags = {name: where.expand_as(batch.mask) for name, where in flags.items()}
    return Observed(batch.mask, _detached(values), _detached(terms), _detached(weights), flags)


def _detached(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}


@torch.no_grad()
def of_step(parts: Sequence[Observed]) -> dict[str, Metric]:
    """Metrics of the learning phase, over the micro-batches of one optimizer step.

    ``entropy``; ``clip_ratio/{low,high,region,dual}_mean``, ``clip_ratio/low_min`` and ``clip_ratio/high_max`` from
    what the clip rule says it clipped; ``approx_kl``, the k3 estimate of KL(old policy, policy); ``kl`` as it is
    trained, and ``kl/k3`` for monitoring; of each token weight its mean ``token_weight/{name}`` and the share of tokens
    that it takes out, ``token_weight/{name}/zero``; one per regularizer, and ``clip_ratio/value`` of the value loss.
    """
    mask = _end_to_end(part.mask for part in parts)
    tokens = mask.count_nonzero()
    v = {name: _end_to_end(part.values[name] for part in parts) for name in parts[0].values}

    def mean(values: Tensor) -> Metric:
        return Metric(select(values, mask).sum(), tokens)

    # What a batch holds is 0 where nothing counts, and k3 of that is too.
    out = {"approx_kl": Metric(k3(v["old_log_probs"], v["log_probs"]).sum(), tokens)}
    if "entropies" in v:
        out["entropy"] = Metric(v["entropies"].sum(), tokens)
    out |= _clips(parts)
    if "kl" in v:
        out["kl"] = mean(v["kl"])
        if "ref_log_probs" in v:
            out["kl/k3"] = Metric(k3(v["log_probs"], v["ref_log_probs"]).sum(), tokens)
        else:
            out["kl/k3"] = out["kl"]
    if "valued" in v:  # where the clip of a value loss takes the gradient away
        out["clip_ratio/value"] = Metric((v["value_clipped"] & v["valued"]).sum(), v["valued"].sum())
    for name in parts[0].weights:
        weight = _end_to_end(part.weights[name] for part in parts)
        out[f"token_weight/{name}"] = mean(weight)
        out[f"token_weight/{name}/zero"] = mean((weight == 0).float())
    for name in parts[0].terms:
        term = mean(_end_to_end(part.terms[name] for part in parts))
        out[name if name not in out else f"regularizer/{name}"] = term
    return out


def _end_to_end(tensors: Iterable[Tensor]) -> Tensor:
    """All elements of (B, T) tensors in one row: micro-batches differ in width."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _clips(parts: Sequence[Observed]) -> dict[str, Metric]:
    """Shares of what the clip rule says it clipped, and the least and largest share of any completion."""
    names = [*parts[0].clipped]
    if not names:
        return {}
    if "low" in names and "high" in names:
        names.append("region")
    counts = torch.cat([_clipped_of(part) for part in parts], dim=1)  # (flags and what they are of, completions)
    *clipped, count = counts.sum(1)
    out = {f"clip_ratio/{name}_mean": Metric(total, count) for name, total in zip(names, clipped, strict=True)}
    shares = (counts[:-1] / counts[-1]).unbind()
    empty, some = counts[-1] == 0, count.clamp(max=1)
    for name, share in zip(names, shares, strict=True):
        if name == "low":
            out["clip_ratio/low_min"] = Metric(share.masked_fill(empty, torch.inf).amin(), some, "min")
        if name == "high":
            out["clip_ratio/high_max"] = Metric(share.masked_fill(empty, -torch.inf).amax(), some, "max")
    return out


def _clipped_of(part: Observed) -> Tensor:
    """How many tokens of each completion were clipped, by flag, and at last how many there are; (flags + 1, B)."""
    flags, mask = dict(part.clipped), part.mask
    if next(iter(flags.values())).shape != mask.shape:  # one for a completion
        mask = mask.count_nonzero(1)[:, None] > 0
    if "low" in flags and "high" in flags:
        flags["region"] = flags["low"] | flags["high"]
    return (torch.stack([*flags.values(), mask]) & mask).count_nonzero(2)


def _mean(values: Tensor, mask: Tensor | None = None) -> Metric:
    values = values.detach()
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    return Metric(select(values, mask).sum(), mask.sum())
