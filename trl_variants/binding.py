"""A component bound to its parameters, and the workspace of named inputs that it is called with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from trl_variants.components.masked import at_last_token, masked_sum, select
from trl_variants.data import FINITE, Advantages, ClipResult
from trl_variants.declaration import ComponentInfo
from trl_variants.errors import VariantError
from trl_variants.registry import Owner
from trl_variants.slots import SLOTS

__all__ = ["Bound", "States", "Workspace"]

#: The state of stateful components, by "slot.name".
States = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Bound:
    """A component in a slot, with its parameters and its owner.

    Attributes:
        slot: The slot.
        info: The component.
        parameters: Its parameters and those that the slot adds, by name.
        owner: Who registered it.
        parts: For a component that names ``part_advantages``: of each part the estimator, then its normalizers.
        place: Where it stands inside another component; "" for a slot of the variant.
    """

    slot: str
    info: ComponentInfo
    parameters: Mapping[str, Any]
    owner: Owner
    parts: tuple[tuple[Bound, ...], ...] = ()
    place: str = ""

    @property
    def name(self) -> str:
        """The component's name."""
        return self.info.name

    @property
    def key(self) -> str:
        """Where this component's state is kept."""
        return f"{self.slot}.{self.place}{self.info.name}"

    @property
    def with_parts(self) -> Iterator[Bound]:
        """The components of its parts, in the order in which they run, and itself."""
        for part in self.parts:
            for bound in part:
                yield from bound.with_parts
        yield self

    @property
    def who(self) -> str:
        """The component with its owner, for messages."""
        return f"{self.slot} '{self.name}' ({self.owner})"

    @cached_property
    def own(self) -> dict[str, Any]:
        """The parameters that the function takes: those of the slot are not among them."""
        return {name: self.parameters[name] for name in self.info.parameters}

    @property
    def min_generations(self) -> int:
        """Least completions per prompt, with these parameters."""
        return self.info.least_generations(self.parameters)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.name}({arguments})" if arguments else self.name


class Workspace:
    """The named inputs of one call of a recipe, and the calling of components with them.

    Rewards are kept as a scalar per completion plus terms per token, so that a component that names ``rewards`` sees
    the tokens' terms summed in, one that names ``token_rewards`` sees the scalar on the last policy token, and nobody
    can miss what was placed the other way.
    """

    def __init__(self, inputs: Mapping[str, Any], states: States | None = None) -> None:
        self.inputs: dict[str, Any] = dict(inputs)
        self._given = frozenset(inputs)
        self.states: dict[str, dict[str, Any]] = dict(states or {})
        self.outputs: list[tuple[Bound, Any]] = []
        self._token_terms: Tensor | None = None

    def __getitem__(self, name: str) -> Any:
        if name == "token_rewards":
            placed = at_last_token(self.inputs["rewards"], self.mask)
            return placed if self._token_terms is None else placed + self._token_terms
        value: Any = self.inputs.get(name)
        if name == "rewards" and value is not None and self._token_terms is not None:
            return value + masked_sum(self._token_terms, self.mask, dim=1)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self.inputs[name] = value

    @property
    def mask(self) -> Tensor:
        """(N, T) or (B, T) bool."""
        mask: Tensor = self.inputs["mask"]
        return mask

    def set_rewards(self, value: Tensor) -> None:
        """Replace the rewards by (N,) scalars or (N, T) token rewards."""
        if value.dim() == 1:
            self.inputs["rewards"], self._token_terms = value, None
        else:
            self.inputs["rewards"], self._token_terms = torch.zeros_like(value[:, 0]), select(value, self.mask)

    def reshape_rewards(self, bound: Bound) -> None:
        """Run a component that changes rewards; one that names none of them returns a term to add."""
        result = self.call(bound)
        if "rewards" in bound.info.inputs or "token_rewards" in bound.info.inputs:
            self.set_rewards(result)
        elif result.dim() == 1:
            self.inputs["rewards"] = self.inputs["rewards"] + result.to(self.inputs["rewards"].dtype)
        else:
            self._token_terms = result if self._token_terms is None else self._token_terms + result

    def call(self, bound: Bound) -> Any:
        """Call a component with the inputs that it names, and check what it returns."""
        arguments: dict[str, Any] = {}
        for name in bound.info.inputs:
            value: Any
            if name == "state":
                value = self.states.get(bound.key, {})
            elif name == "part_advantages":
                value = [self.estimated(*part) for part in bound.parts]
            else:
                value = self[name]
            if value is None and bound.info.needs(name):
                raise VariantError(f"{bound.slot} '{bound.name}' needs {name}, and there is none here.")
            arguments[name] = value
        try:
            result = bound.info.function(*arguments.values(), **bound.own)
        except VariantError:
            raise
        except Exception as error:
            raise VariantError(f"{bound.who} failed: {error}") from error
        if "state" in bound.info.inputs:
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
                raise VariantError(f"{bound.slot} '{bound.name}' names state, so it must return (output, new_state).")
            result, self.states[bound.key] = result
            _check_state(bound.who, self.states[bound.key])
        result = _checked(bound, result, self.inputs.get("mask"))
        self.outputs.append((bound, result))
        return result

    def estimated(self, estimator: Bound, *normalizers: Bound) -> Advantages:
        """Run an estimator and its normalizers; 0 for completions without any reward, and at masked positions.

        The result is the input ``advantages`` from then on.
        """
        estimate: Advantages = self.call(estimator)
        self["advantages"] = self._trained(estimate.advantages)
        for normalizer in normalizers:
            self["advantages"] = self._trained(self.call(normalizer))
        return Advantages(self["advantages"], estimate.returns)

    def _trained(self, advantages: Tensor) -> Tensor:
        scored: Tensor = self.inputs["scored"]
        if not advantages.is_floating_point():  # ranks and counts may be whole numbers
            advantages = advantages.to(self.inputs["rewards"].dtype)
        return select(advantages, scored if advantages.dim() == 1 else scored[:, None] & self.mask)

    def require_finite(self) -> None:
        """Raise a `VariantError` that names the first value that is not finite at a valid place."""
        for name, value in self.inputs.items():
            if name in FINITE and name in self._given and not _finite(value, self.mask):
                raise VariantError(f"{name} holds a value that is not finite at a position that counts.")
        for bound, result in self.outputs:
            for value in (result.loss,) if isinstance(result, ClipResult) else _tensors(result):
                if not _finite(value, self.mask):
                    raise VariantError(f"{bound.who} made a value that is not finite at a position that counts.")


def _checked(bound: Bound, result: Any, mask: Tensor | None) -> Any:
    """Check the type and shape of what a component returned."""
    if bound.slot == "kl_controller":
        if isinstance(result, bool) or not isinstance(result, (int, float)):
            raise VariantError(f"{bound.who} returned {type(result).__name__}; it must return a number.")
        if not 0 <= result < float("inf"):
            raise VariantError(f"{bound.who} returned {result}; a coefficient is finite and not negative.")
        return float(result)
    if bound.slot == "token_weight" and result is None:
        return None
    if bound.slot == "clip_rule":
        if not isinstance(result, ClipResult):
            raise VariantError(f"{bound.who} returned {type(result).__name__}; it must return a ClipResult.")
        _check_shape(bound, result.loss, mask)
        for name in ("low", "high", "dual"):
            if (flag := getattr(result, name)) is not None:
                _check_shape(bound, flag, mask, f": {name}")
                if flag.dtype is not torch.bool:
                    raise VariantError(f"{bound.who}: {name} is of {flag.dtype}; it says which tokens, so torch.bool.")
        return result
    if bound.slot == "advantage_estimator":
        result = result if isinstance(result, Advantages) else Advantages(result)
        _check_shape(bound, result.advantages, mask)
        targets = result.returns
        if targets is not None and not isinstance(targets, Tensor):
            raise VariantError(f"{bound.who} returned returns of type {type(targets).__name__}; expected a tensor.")
        if targets is not None and (mask is None or targets.shape != mask.shape):
            raise VariantError(f"{bound.who} returned returns of shape {tuple(targets.shape)}; expected (N, T).")
        return result
    _check_shape(bound, result, mask)
    return result


def _check_shape(bound: Bound, value: Any, mask: Tensor | None, part: str = "") -> None:
    shapes = SLOTS[bound.slot].shapes
    if isinstance(value, Tensor) and mask is not None and value.shape == mask.shape and "NT" in shapes:
        return  # the most common
    if not isinstance(value, Tensor):
        raise VariantError(f"{bound.who}{part} returned {type(value).__name__}; it must return a tensor.")
    rows, tokens = mask.shape if mask is not None else (0, 0)
    sizes = {"": (), "N": (rows,), "NT": (rows, tokens), "N1": (rows, 1)}
    wanted = [sizes[shape] for shape in shapes]
    if tuple(value.shape) not in wanted:
        expected = " or ".join(map(str, wanted))
        raise VariantError(f"{bound.who}{part} returned a tensor of shape {tuple(value.shape)}; expected {expected}.")


def _check_state(where: str, state: Any) -> None:
    """Refuse what a checkpoint could save and not load again."""
    if isinstance(state, dict):
        for key, value in state.items():
            _check_state(where, key)
            _check_state(where, value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            _check_state(where, value)
    elif isinstance(state, Tensor):
        if state.requires_grad:
            raise VariantError(f"{where} keeps a tensor with its gradient in its state; keep it detached.")
    elif type(state) not in (int, float, bool, str, type(None)):
        raise VariantError(
            f"{where} keeps a {type(state).__name__} in its state; a state holds numbers, strings, tensors, lists and "
            "dicts, so that a checkpoint can hold it."
        )


def _tensors(result: Any) -> tuple[Any, ...]:
    return (result.advantages, result.returns) if isinstance(result, Advantages) else (result,)


def _finite(value: Any, mask: Tensor) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    return bool((select(value, mask) if value.shape == mask.shape else value).isfinite().all())
