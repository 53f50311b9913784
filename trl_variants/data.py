"""What flows through a recipe: shapes stated, and checked once.

Shape letters are those of ``slots.py``. Floating-point tensors are at least float32 from here on (float64 stays), and
what stands at masked positions is selected away here, in value and gradient, so that no component can trip over it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from trl_variants.components.masked import counted, select
from trl_variants.errors import VariantError

__all__ = ["Advantages", "Batch", "ClipResult", "Metric", "Rollout", "Totals"]


@dataclass(frozen=True)
class Advantages:
    """What an advantage estimator may return when it also makes targets for a critic.

    Attributes:
        advantages: (N,) or (N, T).
        returns: (N, T) targets of the critic, taken before any normalizer.
    """

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True)
class ClipResult:
    """What a clip rule returns.

    Attributes:
        loss: (B, T) or (B, 1), to be minimised.
        low: Same shape, bool: where the lower bound took the gradient away.
        high: Same shape, bool: where the upper bound did.
        dual: Same shape, bool: where the second bound of dual-clip did.
    """

    loss: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    dual: Tensor | None = None


@dataclass(frozen=True)
class Metric:
    """A number to log, kept so that parts of a step and ranks can be joined exactly.

    Attributes:
        total: 0-dim: the sum, or the extreme value.
        count: 0-dim: how many values the sum is over; the mean is total / count.
        reduce: How parts are joined.
    """

    total: Tensor
    count: Tensor
    reduce: Literal["mean", "min", "max"] = "mean"

    def __float__(self) -> float:
        if float(self.count) == 0:
            return float("nan")
        return float(self.total / self.count) if self.reduce == "mean" else float(self.total)


@dataclass(frozen=True)
class Totals:
    """What the loss of one optimizer step is divided by: counts over its micro-batches on all ranks.

    Attributes:
        tokens: Policy tokens.
        sequences: Completions with at least one policy token.
        rows: All completions, fully masked ones included.
        micro_batches: Micro-batches, over all ranks.
        max_length: The length limit of a completion.
    """

    tokens: float
    sequences: float
    rows: float
    micro_batches: float = 1
    max_length: int = 0

    @classmethod
    def of(cls, mask: Tensor, max_length: int | None = None) -> Totals:
        """The totals of a (B, T) mask that is one whole optimizer step."""
        return cls(
            tokens=float(mask.sum()),
            sequences=float(mask.bool().any(1).sum()),
            rows=float(mask.shape[0]),
            max_length=mask.shape[1] if max_length is None else max_length,
        )


#: Inputs that must be finite where a token counts.
FINITE = (
    "log_probs",
    "old_log_probs",
    "ref_log_probs",
    "entropies",
    "values",
    "old_values",
    "returns",
    "advantages",
)


@functools.cache
def _names(kind: type[Any]) -> tuple[tuple[str, ...], frozenset[str]]:
    """The fields of a class, and those that may be None."""
    return tuple(f.name for f in fields(kind)), frozenset(f.name for f in fields(kind) if f.default is None)


class _Tensors:
    """Checks and cleaning that `Rollout` and `Batch` share."""

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _names(type(self))[0]}  # type: ignore[arg-type]

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _tensor(self, name: str, *shapes: tuple[int | None, ...], dtype: torch.dtype | None = None) -> None:
        value = getattr(self, name)
        if value is None and name in _names(type(self))[1]:  # type: ignore[arg-type]
            return
        if isinstance(value, Tensor) and value.shape in shapes:
            if value.dtype is dtype or (dtype is None and value.dtype in (torch.float32, torch.float64)):
                return
        where = f"{type(self).__name__}.{name}"
        if not isinstance(value, Tensor):
            raise VariantError(f"{where} must be a tensor, not {type(value).__name__}.")
        if not any(
            value.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, value.shape, strict=True))
            for shape in shapes
        ):
            wanted = " or ".join(
                "(" + ", ".join("any" if n is None else str(n) for n in shape) + ")" for shape in shapes
            )
            raise VariantError(f"{where} has shape {tuple(value.shape)}; expected {wanted}.")
        if dtype is not None:
            value = value.to(dtype)
        elif value.dtype not in (torch.float32, torch.float64):
            value = value.float()
        self._set(name, value)

    def _clean(self, *names: str) -> None:
        mask: Tensor = self.mask  # type: ignore[attr-defined]
        for name in names:
            value = getattr(self, name)
            if value is not None:
                self._set(name, select(value, counted(value, mask)))


@dataclass(frozen=True, kw_only=True)
class Rollout(_Tensors):
    """One generation batch, over all processes, without gradient.

    Attributes:
        rewards: (N,) weighted sum of the reward functions, before any shaping.
        scored: (N,) bool; False where every reward function returned None, for the completion or for the greedy one.
        rewards_per_func: (N, F); NaN where a function returned None.
        reward_weights: (F,).
        group_ids: (N,) equal for the completions of one prompt, in any order.
        mask: (N, T) bool; True where a token counts.
        lengths: (N,) tokens as generated, tool tokens included.
        truncated: (N,) bool; True where the completion was cut by the length limit.
        has_eos: (N,) bool; True where it ends with a stop token.
        max_length: The length limit of a completion.
        reward_names: Names of the F reward functions.
        log_probs: (N, T) of the policy at the rollout.
        ref_log_probs: (N, T) of the reference model.
        sampling_log_probs: (N, T) as the generation engine computed them.
        values: (N, T) the critic's V_t, read at the position that predicts token t.
        final_values: (N,) the critic's value after the last token.
        greedy_rewards: (N,) the reward of the greedy completion of each row's prompt.
    """

    rewards: Tensor
    scored: Tensor
    rewards_per_func: Tensor
    reward_weights: Tensor
    group_ids: Tensor
    mask: Tensor
    lengths: Tensor
    truncated: Tensor
    has_eos: Tensor
    max_length: int
    reward_names: tuple[str, ...] = ()
    log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    sampling_log_probs: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None
    greedy_rewards: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes, cast to float32 or better, select masked positions away."""
        self._tensor("mask", (None, None), dtype=torch.bool)
        rows, tokens = self.mask.shape
        for name in ("rewards", "final_values", "greedy_rewards"):
            self._tensor(name, (rows,))
        for name in ("scored", "truncated", "has_eos"):
            self._tensor(name, (rows,), dtype=torch.bool)
        for name in ("group_ids", "lengths"):
            self._tensor(name, (rows,), dtype=torch.long)
        self._tensor("reward_weights", (None,))
        self._tensor("rewards_per_func", (rows, len(self.reward_weights)))
        for name in ("log_probs", "ref_log_probs", "sampling_log_probs", "values"):
            self._tensor(name, (rows, tokens))
        self._set("rewards", select(self.rewards, self.scored))
        if self.greedy_rewards is not None:
            self._set("greedy_rewards", select(self.greedy_rewards, self.scored))
        for name in ("rewards", "greedy_rewards"):
            value = getattr(self, name)
            if value is not None and not value.isfinite().all():
                raise VariantError(f"Rollout.{name} holds a value that is not finite, at a completion that is scored.")
        self._clean("log_probs", "ref_log_probs", "sampling_log_probs", "values")

    def first(self, rows: int) -> Rollout:
        """The rollout of its first rows alone."""
        given = self._fields()
        per_row = [name for name, value in given.items() if isinstance(value, Tensor) and name != "reward_weights"]
        return Rollout(**{**given, **{name: given[name][:rows] for name in per_row}})

    def tensors(self) -> dict[str, Any]:
        """The inputs that a component may name, by name."""
        return {**self._fields(), "samples": len(self.rewards)}


@dataclass(frozen=True, kw_only=True)
class Batch(_Tensors):
    """One micro-batch. Gradients flow through log_probs, entropies and values only.

    Attributes:
        log_probs: (B, T) of the current policy.
        mask: (B, T) bool; True where a token counts.
        advantages: (B, T), (B, 1) or (B,).
        totals: Of the optimizer step that this micro-batch belongs to.
        old_log_probs: (B, T) of the policy at the rollout; the current ones, detached, where left out.
        ref_log_probs: (B, T) of the reference model.
        sampling_log_probs: (B, T) as the generation engine computed them; NaN where it could not.
        entropies: (B, T) in nats.
        values: (B, T) of the critic now.
        old_values: (B, T) of the critic at the rollout.
        returns: (B, T) targets of the critic.
        rewards: (B,).
        scored: (B,) bool; False where every reward function returned None.
        step: Number of the optimizer step.
        clean: Whether all of it is 0 at masked positions already, so that nothing need be selected away.
    """

    log_probs: Tensor
    mask: Tensor
    advantages: Tensor
    totals: Totals
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    sampling_log_probs: Tensor | None = None
    entropies: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    rewards: Tensor | None = None
    scored: Tensor | None = None
    step: int = 0
    clean: bool = False

    def __post_init__(self) -> None:
        """Check shapes, cast to float32 or better, select masked positions away."""
        self._tensor("mask", (None, None), dtype=torch.bool)
        rows, tokens = self.mask.shape
        per_token = ("log_probs", "old_log_probs", "ref_log_probs", "sampling_log_probs", "entropies", "values")
        for name in (*per_token, "old_values", "returns"):
            self._tensor(name, (rows, tokens))
        self._tensor("advantages", (rows, tokens), (rows, 1), (rows,))
        self._tensor("rewards", (rows,))
        self._tensor("scored", (rows,), dtype=torch.bool)
        if self.advantages.dim() == 1:
            self._set("advantages", self.advantages[:, None])
        if not self.clean:
            self._clean(*per_token, "old_values", "returns", "advantages")
        if self.old_log_probs is None:
            self._set("old_log_probs", self.log_probs.detach())

    def sum_of_all(self, *more: Tensor) -> Tensor:
        """0-dim: finite only if everything that must be finite is, and ``more``. An engine's log-probs may be NaN.

        A sum is one pass, a test of every element several. It may overflow, or meet junk, though all that counts is
        finite.
        """
        # What is clean was checked as a rollout already, but for what a forward makes; and that shows in the ratio, and
        # in the loss where a component uses it.
        given = (*(getattr(self, name) for name in (() if self.clean else FINITE)), *more)
        total: Tensor = functools.reduce(torch.add, (value.sum() for value in given if value is not None))
        return total

    def tensors(self) -> dict[str, Any]:
        """The inputs that a component may name, by name."""
        return self._fields()
