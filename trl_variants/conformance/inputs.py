"""What the conformance kit runs components on: made-up inputs, smallest first, and a variant to stand in.

The first input on which a property fails is therefore the smallest that was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_variants.binding import Bound
from trl_variants.data import Advantages, Totals
from trl_variants.declaration import ComponentInfo
from trl_variants.slots import SLOTS
from trl_variants.variant import KL, Use, Variant

__all__ = ["FLOATS", "Case", "cases", "describe", "hosts", "pick"]

#: Inputs per token: junk may stand in them where the mask is False.
FLOATS = frozenset(
    ("log_probs", "old_log_probs", "ref_log_probs", "sampling_log_probs", "entropies", "values", "old_values")
    + ("returns", "advantages", "token_rewards", "log_ratio", "token_weights", "per_token_loss", "kl")
)


@dataclass(frozen=True)
class Case:
    """A rollout and a batch of the same completions, the same for the same case.

    Attributes:
        groups: Completions of each prompt; rows are not in the order of groups.
        width: Completion tokens, padding included.
        dtype: Of every floating-point tensor.
        empty: Whether the last row has no policy token.
    """

    groups: tuple[int, ...]
    width: int
    dtype: torch.dtype = torch.float64
    empty: bool = False

    @property
    def rows(self) -> int:
        """N, and B."""
        return sum(self.groups)

    def lengths(self) -> Tensor:
        """(N,) tokens of each completion as generated."""
        return torch.arange(self.rows) % self.width + 1

    def mask(self) -> Tensor:
        """(N, T): rows of different lengths, every other long one with a gap such as a tool's output leaves."""
        column, lengths = torch.arange(self.width)[None], self.lengths()[:, None]
        gap = (column == 1) & (lengths >= 3) & (torch.arange(self.rows)[:, None] % 2 == 0)
        mask = (column < lengths) & ~gap
        if self.empty:
            mask[-1] = False
        return mask

    def rollout(self) -> dict[str, Any]:
        """Every field of a `Rollout`."""
        normal = self._normal(seed=1)
        per_func = normal(self.rows, 2)
        weights = torch.tensor([0.7, 0.3], dtype=self.dtype)
        group_ids = torch.tensor([g for g, size in enumerate(self.groups) for _ in range(size)])
        group_ids = group_ids[torch.randperm(self.rows, generator=torch.Generator().manual_seed(0))]
        lengths = self.lengths()
        return {
            "rewards": per_func @ weights,
            "scored": torch.ones(self.rows, dtype=torch.bool),
            "rewards_per_func": per_func,
            "reward_weights": weights,
            "reward_names": ("first", "second"),
            "group_ids": group_ids,
            "mask": self.mask(),
            "lengths": lengths,
            "truncated": lengths == self.width,
            "has_eos": lengths != self.width,
            "max_length": self.width,
            "log_probs": -normal(self.rows, self.width).abs(),
            "ref_log_probs": -normal(self.rows, self.width).abs(),
            "sampling_log_probs": -normal(self.rows, self.width).abs(),
            "values": normal(self.rows, self.width),
            "final_values": normal(self.rows),
            "greedy_rewards": normal(len(self.groups))[group_ids],
        }

    def batch(self, per_token: bool = False) -> dict[str, Any]:
        """Every field of a `Batch`; advantages (B, 1), or (B, T) where ``per_token``."""
        normal, mask = self._normal(seed=2), self.mask()
        log_probs = -normal(self.rows, self.width).abs()
        near = {
            name: log_probs + 0.3 * normal(self.rows, self.width)
            for name in ("old_log_probs", "ref_log_probs", "sampling_log_probs")
        }
        return {
            "log_probs": log_probs,
            **near,
            "mask": mask,
            "advantages": normal(self.rows, self.width if per_token else 1),
            "entropies": normal(self.rows, self.width).abs(),
            **{name: normal(self.rows, self.width) for name in ("values", "old_values", "returns")},
            "rewards": normal(self.rows),
            "scored": torch.ones(self.rows, dtype=torch.bool),
            "totals": Totals.of(mask),
            "step": 1,
        }

    def inputs(self, slot: str) -> dict[str, Any]:
        """Every input that a component of the slot may name, as its bare function takes it."""
        normal, shape = self._normal(seed=3), (self.rows, self.width)
        rollout = SLOTS[slot].phase == "rollout"
        names = (
            ("token_rewards", "kl", "advantages") if rollout else ("token_rewards", "kl", "log_ratio", "per_token_loss")
        )
        return {
            **(self.rollout() if rollout else self.batch(per_token=True)),
            **{name: normal(*shape) for name in names},
            "token_weights": normal(*shape).abs(),
            "part_advantages": [Advantages(normal(*shape))],
            "keep": torch.ones(self.rows, dtype=torch.bool),
            "measured_kl": 0.3,
            "measured_sequence_kl": 2.0,
            "samples": self.rows,
            "kl_coef": 0.1,
            "gather": _alone,
            "state": {},
        }

    def _normal(self, seed: int) -> Callable[..., Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)


def _alone(tensor: Tensor) -> Tensor:
    return tensor


def cases(least: int = 1, dtype: torch.dtype = torch.float64) -> Iterator[Case]:
    """Cases from small to large, with at least ``least`` completions per prompt."""
    least = max(least, 2)
    yield Case((least,), 1, dtype)
    yield Case((least, least), 3, dtype)
    yield Case((least + 1, least, least + 2), 5, dtype, empty=True)


def pick(fields: dict[str, Any], rows: Sequence[int] | Tensor) -> dict[str, Any]:
    """The fields of some rows, in that order; ``totals`` and all that has no rows stay."""
    count = len(fields["mask"])
    index = torch.as_tensor(rows)
    return {
        name: value[index]
        if isinstance(value, Tensor) and name != "reward_weights" and value.dim() and len(value) == count
        else value
        for name, value in fields.items()
    }


def describe(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """The named inputs, for a message."""

    def show(value: Any) -> str:
        if not isinstance(value, Tensor):
            return repr(value)
        value = value.detach()
        return str([round(v, 4) for v in value.flatten().tolist()] if value.dim() < 2 else _rows(value))

    return ", ".join(f"{name}={show(fields[name])}" for name in dict.fromkeys(names) if name in fields)


def _rows(value: Tensor) -> list[list[float]]:
    return [[round(v, 4) for v in row] for row in value.tolist()]


# -- a variant for a component to stand in ----------------------------------------------------------------------------


def hosts(slot: str, bound: Bound, component: Use) -> Iterator[Variant]:
    """Variants that hold the component, with as little besides as can be; the first is the one to show."""
    needed = [name for inner in bound.with_parts for name in inner.info.inputs if inner.info.needs(name)]
    critic = bool({"values", "old_values", "returns"} & {*needed})
    filled: dict[str, Any] = {
        "advantage_estimator": "gae" if critic else "returns",
        "advantage_normalizer": (),
        "importance_ratio": "token",
        "clip_rule": "ppo_clip",
        "token_weight": (),
        "loss_aggregator": "seq_mean_token_mean",
        "kl": None,
        "critic": "separate" if critic else None,
    }
    for changes in _changes(slot, bound.info, component):
        yield Variant(name="conformance", **{**filled, **changes})


def _changes(slot: str, info: ComponentInfo, component: Use) -> Iterator[dict[str, Any]]:
    per_token = {"advantage_estimator": "reward_to_go"}
    if slot == "kl_estimator":
        yield {"kl": KL(component, placement="loss", coef=0.1, weighted=True)}
        yield {"kl": KL(component, placement="sequence_reward", coef=0.1)}
        yield {"kl": KL(component, placement="token_reward", coef=0.1), **per_token}
    elif slot == "kl_placement":
        yield {"kl": KL("k3", placement=component, coef=0.1), **per_token}
    elif slot == "kl_controller":
        yield {"kl": KL("k1", placement="sequence_reward", coef=0.1, controller=component)}
    elif slot == "reward_shaper":
        yield {slot: component}
        yield {slot: component, "kl": KL("k1", placement="token_reward", coef=0.1), **per_token}
    elif slot == "sample_filter":
        yield {slot: component, "advantage_normalizer": "batch_std"}
    elif slot == "advantage_normalizer":
        yield {slot: component, **({"advantage_estimator": "group_mean"} if info.centres_groups() else {})}
    elif slot == "importance_ratio":
        yield {slot: component, **({"clip_rule": "policy_gradient"} if info.level == "one" else {})}
    elif slot == "clip_rule":
        ratio = "token" if "log_ratio" in info.inputs else "none"
        weight = "rollout_correction" if "token_weights" in info.inputs else ()
        yield {slot: component, "importance_ratio": ratio, "token_weight": weight}
    else:
        yield {slot: component}
