"""A variant: a named combination of components. Frozen, keyword-only, inheriting by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

__all__ = ["INHERIT", "KL", "ComponentLike", "SlotValue", "Use", "Variant", "use"]


class _Inherit:
    """Stands for "not said here": taken from ``extends``, else the slot's default."""

    def __repr__(self) -> str:
        return "INHERIT"


INHERIT: Any = _Inherit()


@dataclass(frozen=True)
class Use:
    """A component, by name or itself, with parameters. Written with `use`."""

    component: str | Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)


ComponentLike: TypeAlias = "str | Callable[..., Any] | Use"
SlotValue: TypeAlias = "ComponentLike | Sequence[ComponentLike] | None"


def use(component: str | Callable[..., Any], **parameters: Any) -> Use:
    """Name a component together with its parameters.

    Example:
        >>> use("ppo_clip", epsilon_high=0.28).parameters["epsilon_high"]
        0.28
    """
    return Use(component, MappingProxyType(dict(parameters)))


@dataclass(frozen=True)
class KL:
    """Where and how the KL to the reference model enters.

    Attributes:
        estimator: A ``kl_estimator``: how KL is estimated per token.
        placement: A ``kl_placement``: ``token_reward``, ``sequence_reward`` or ``loss``.
        coef: The coefficient beta, at the start when a controller moves it.
        weighted: For ``loss``: multiply by the importance ratio, differentiably (True) or ``"detached"``.
        controller: A ``kl_controller``: ``fixed`` or ``use("adaptive", target=...)``.
    """

    estimator: ComponentLike
    placement: ComponentLike = field(kw_only=True)
    coef: float = field(kw_only=True)
    weighted: bool | Literal["detached"] = field(default=False, kw_only=True)
    controller: ComponentLike = field(default="fixed", kw_only=True)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A named combination of components and the trainer settings that belong to it.

    A slot that is left out is inherited from ``extends``; ``"none"``, ``None`` or ``[]`` switches it off.

    Attributes:
        name: Name in configs.
        extends: Name of the variant that this one starts from.
        paper: Address of the paper.
        summary: One sentence: what differs, and why.
        num_generations: Completions per prompt that the variant proposes; the user wins.
        num_iterations: Epochs over each rollout that the variant proposes; the user wins.
        max_updates_per_rollout: Most optimizer steps that one rollout may be used for; more is refused.
        critic: ``"separate"`` (a model of its own), ``"shared"`` (a head on the policy's backbone) or None.
        reshuffle: Whether each epoch over a rollout shuffles its rows into other mini-batches.
        sampling: ``"mask"`` leaves out the rows that a sample filter drops; ``"resample"`` draws further prompts until
            a rollout is full of groups that the filters keep.
    """

    name: str
    extends: str | None = None
    paper: str | None = None
    summary: str | None = None
    sample_filter: SlotValue = INHERIT
    reward_shaper: SlotValue = INHERIT
    kl: KL | Literal["none", False] | None = INHERIT
    advantage_estimator: SlotValue = INHERIT
    advantage_normalizer: SlotValue = INHERIT
    importance_ratio: SlotValue = INHERIT
    clip_rule: SlotValue = INHERIT
    token_weight: SlotValue = INHERIT
    regularizer: SlotValue = INHERIT
    loss_aggregator: SlotValue = INHERIT
    num_generations: int | None = INHERIT
    num_iterations: int | None = INHERIT
    max_updates_per_rollout: int | None = INHERIT
    critic: Literal["separate", "shared"] | None = INHERIT
    reshuffle: bool = INHERIT
    sampling: Literal["mask", "resample"] = INHERIT

    def over(self, parent: Variant) -> Variant:
        """Return this variant with everything that it leaves out taken from ``parent``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        inherited = {name: getattr(parent, name) for name, value in values.items() if value is INHERIT}
        return Variant(**{**values, **inherited, "extends": parent.extends})
