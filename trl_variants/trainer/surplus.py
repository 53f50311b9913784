"""What resampling decides, apart from the trainer: its limits, how a rollout is filled, and the groups that wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trl_variants.errors import VariantError
from trl_variants.trainer.config_checks import can_carry
from trl_variants.trainer.rows import Rows, count, take

__all__ = ["IMAGES", "Limits", "Surplus", "plain", "refuse_unsupported", "select", "unsupported"]

#: Columns of a dataset that hold images.
IMAGES = ("image", "images")


@dataclass(frozen=True)
class Limits:
    """How far the rounds of one rollout go.

    Attributes:
        max_rounds: Most rounds.
        max_carry_age: Rollouts that a surplus group may wait; 0 carries none.
    """

    max_rounds: int
    max_carry_age: int

    @classmethod
    def of(cls, config: Any) -> Limits:
        """The limits that a `VariantConfig` sets, with the defaults for what it leaves out."""
        carries = can_carry(config.recipe) if config.carry_surplus is None else config.carry_surplus
        return cls(config.max_rounds or 10, (config.max_carry_age or 1) if carries else 0)


class Surplus:
    """Kept groups that wait for the next rollout.

    Args:
        max_age: Rollouts that a group may wait.
        generations: Completions per prompt.

    Attributes:
        rows: The rows of the groups, with ``carried_log_probs`` and ``age``; None for none.
    """

    def __init__(self, max_age: int, generations: int) -> None:
        self._max_age, self._generations = max_age, generations
        self.rows: Rows | None = None

    def enter(self) -> tuple[list[Rows], int]:
        """Hand over the groups that are young enough, and empty the surplus.

        Returns:
            A list of their rows, or of nothing; and how many groups were too old.
        """
        rows, self.rows = self.rows, None
        if rows is None:
            return [], 0
        rows = rows | {"age": rows["age"] + 1}
        young = (rows["age"] <= self._max_age).nonzero()[:, 0].tolist()
        dropped = (count(rows) - len(young)) // self._generations
        return ([take(rows, young)] if young else []), dropped

    def hold(self, rows: Rows) -> int:
        """Keep the rows of whole groups for the next rollout; the number of groups dropped, where none may wait."""
        if not count(rows):
            return 0
        if not self._max_age:
            return count(rows) // self._generations
        self.rows = rows
        return 0


def select(kept: int, spare: int, groups: int) -> tuple[int, int, int]:
    """How a rollout is filled.

    Args:
        kept: Groups that the filters keep.
        spare: Groups that they drop.
        groups: Groups that a rollout holds.

    Returns:
        How many kept groups are trained on, how many kept ones are surplus, how many dropped ones fill up.

    Example:
        >>> select(5, 3, 4), select(1, 7, 4)
        ((4, 1, 0), (1, 0, 3))
    """
    trained = min(kept, groups)
    return trained, kept - trained, min(spare, groups - trained)


def refuse_unsupported(recipe: Any, dataset: Any, environment_factory: Any) -> None:
    """Raise a `VariantError` where the run holds what resampling cannot gather and hand out again."""
    if recipe.variant.sampling != "resample":
        return
    if any(name in IMAGES for name in getattr(dataset, "column_names", None) or ()):
        raise unsupported("images")
    if environment_factory is not None:
        raise unsupported("an environment_factory")


def plain(value: Any) -> Any:
    """A value of which a checkpoint can hold everything: texts of the table that are something else as their str."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value if type(value) in (str, int, float, bool, type(None)) or isinstance(value, Tensor) else str(value)


def unsupported(what: str) -> VariantError:
    """The error for what resampling cannot gather and hand out again."""
    return VariantError(
        f"sampling 'resample' does not work with {what} in this release. Use variant_overrides: {{sampling: mask}}."
    )
