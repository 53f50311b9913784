"""Running what is tested, and collecting all that comes out of it under one name each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from trl_variants.binding import Bound, States
from trl_variants.components.masked import select
from trl_variants.conformance.inputs import FLOATS, Case, cases, describe, pick
from trl_variants.data import Advantages, Batch, ClipResult, Metric, Rollout, Totals
from trl_variants.errors import VariantError
from trl_variants.recipe import BoundKL, Recipe
from trl_variants.slots import SLOTS

__all__ = ["NonConformance", "Outcome", "Subject", "bare", "joined", "outcome", "runs", "watched"]

#: What came out, by name: "advantages", "loss", "gradient of log_probs", "metric kl", ...
Outcome = dict[str, Tensor]
_LEAVES = ("log_probs", "entropies", "values")
_SHOWN = ("mask", "rewards", "group_ids", "scored", "log_probs", "old_log_probs", "advantages")


class NonConformance(AssertionError):
    """A component or variant breaks the contract.

    Attributes:
        message: What is wrong, without who and on which input.
        broken: The name of the property that it breaks.
    """

    message = broken = ""


@dataclass(frozen=True)
class Subject:
    """What is tested: a whole recipe, or one component in a recipe that holds little else."""

    recipe: Recipe
    bound: Bound | None = None

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The components that are tested."""
        return (self.bound,) if self.bound else tuple(self.recipe.components)

    def runs_in(self, phase: str) -> bool:
        """Whether something of it runs in the phase."""
        if self.bound is None:
            return True
        if SLOTS[self.bound.slot].phase == "both" and self.recipe.kl:
            return (phase == "rollout") == self.recipe.kl.in_reward
        return SLOTS[self.bound.slot].phase == phase

    def cases(self, dtype: torch.dtype = torch.float64) -> Iterator[Case]:
        """Cases from small to large, with as many completions per prompt as the recipe needs."""
        return cases(self.recipe.min_generations, dtype)

    def inputs(self, case: Case) -> Iterator[dict[str, Any]]:
        """The fields of a `Rollout` and of two `Batch`es, as far as they matter here; then without the optional."""
        given = [case.rollout()] if self.runs_in("rollout") else []
        given += [case.batch(), case.batch(per_token=True)] if self.runs_in("learning") else []
        optional = {f.name for f in (*fields(Rollout), *fields(Batch)) if f.default is None}
        optional &= self.bound.info.optional_inputs if self.bound else set()
        for every in given:
            yield every
            fewer = {name: value for name, value in every.items() if name not in optional}
            if len(fewer) < len(every) and runs(outcome, self.recipe, fewer):
                yield fewer

    def bare_inputs(self, case: Case) -> Iterator[tuple[Bound, dict[str, Any]]]:
        """The component and what its bare function takes, if it reads a mask: advantages in both shapes.

        Not one that is made of parts, whose outputs are clean before it sees them.
        """
        if self.bound is None or "mask" not in self.bound.info.inputs or self.bound.parts:
            return
        bound, every = self.bound, case.inputs(self.bound.slot)
        found = [every]
        if bound.slot == "advantage_normalizer":  # it may refuse one of the two shapes
            found = [{**every, "advantages": a} for a in (every["advantages"], every["advantages"][:, 0])]
            found = [given for given in found if runs(bare, bound, given)] or found
        yield from ((bound, given) for given in found)

    def fail(self, message: str, inputs: Mapping[str, Any]) -> NonConformance:
        """The error to raise: who breaks what, and on which input."""
        who = f"{self.bound.slot} '{self.bound.name}'" if self.bound else f"variant '{self.recipe.variant.name}'"
        names = [*_SHOWN, *(name for bound in self.bounds for name in bound.info.inputs)]
        shown = f" Smallest input tried that shows it: {describe(inputs, names)}" if inputs else ""
        made = NonConformance(f"{who}: {message}.{shown}")
        made.message = message
        return made

    def compare(self, got: Outcome, want: Outcome, message: str, inputs: Mapping[str, Any], tol: float = 0.0) -> None:
        """Raise `NonConformance` unless all that is wanted was got."""
        for name, value in want.items():
            if name not in got:
                raise self.fail(f"{message}: there is no {name} any more", inputs)
            a, b = got[name].double(), value.double()
            if a.shape != b.shape or not torch.allclose(a, b, rtol=tol, atol=tol, equal_nan=True):
                raise self.fail(f"{message}: {name} was {b.tolist()} and is {a.tolist()}", inputs)


def runs(call: Callable[..., object], *arguments: Any) -> bool:
    """Whether a call is possible: a component may need an input that is optional for others."""
    try:
        call(*arguments)
    except ValueError:  # VariantError is one
        return False
    return True


def outcome(
    recipe: Recipe, given: Mapping[str, Any], states: States | None = None, *, keep: Tensor | None = None
) -> Outcome:
    """Everything that comes out of `Recipe.advantages` or `Recipe.loss`: values, gradients, metrics."""
    try:
        return _outcome(recipe, given, states, keep)
    except VariantError as error:
        error.__dict__.setdefault("inputs", given)  # for the message, should it be the end
        raise


def _outcome(recipe: Recipe, given: Mapping[str, Any], states: States | None, keep: Tensor | None) -> Outcome:
    if "group_ids" in given:
        done = recipe.advantages(Rollout(**given), states=states, keep=keep)
        found = {name: getattr(done, name) for name in ("advantages", "returns", "keep", "rewards")}
        values = {name: value for name, value in found.items() if value is not None}
        if done.next_kl_coef is not None:
            values["next_kl_coef"] = _number(done.next_kl_coef)
        return {**_valid(values, given["mask"]), **_metrics(done.metrics), **numbers_of(done.states)}
    leaves = leaves_of(given)
    batch: dict[str, Any] = {**given, **leaves}
    result = recipe.loss(Batch(**batch), states=states)
    gradients = gradients_of(result.loss, leaves)
    return {"loss": result.loss.detach(), **gradients, **_metrics(result.metrics), **numbers_of(result.states)}


def bare(bound: Bound, inputs: Mapping[str, Any]) -> Outcome:
    """What the bare function returns at valid positions, its gradient there, and the numbers in its new state."""
    mask = inputs["mask"]
    learning = SLOTS[bound.slot].phase != "rollout"
    leaves = {n: inputs[n].clone().requires_grad_() for n in bound.info.inputs if n in FLOATS and learning}
    own = {name: bound.parameters[name] for name in bound.info.parameters}
    try:
        result = bound.info.function(*({**inputs, **leaves}[name] for name in bound.info.inputs), **own)
    except Exception as error:
        raise VariantError(f"{bound.who} failed: {type(error).__name__}: {error}") from error
    state: Mapping[str, Any] = {}
    if "state" in bound.info.inputs:
        result, state = result
    named = (Advantages, ClipResult)
    parts = {f.name: getattr(result, f.name) for f in fields(result)} if isinstance(result, named) else {"it": result}
    values = _valid({name: torch.as_tensor(v) for name, v in parts.items() if v is not None}, mask)
    uneven = [(v * torch.arange(1, v.numel() + 1).view(v.shape)).sum() for v in values.values() if v.requires_grad]
    gradients = gradients_of(sum(uneven, torch.zeros(())), leaves) if leaves else {}
    return {
        **{name: value.detach() for name, value in values.items()},
        **_valid(gradients, mask),
        **numbers_of({bound.key: dict(state)}),
    }


def leaves_of(given: Mapping[str, Any]) -> Outcome:
    """What gradients flow to, made anew."""
    return {name: given[name].clone().requires_grad_() for name in _LEAVES if name in given}


def micro_batch(given: Mapping[str, Any], rows: Sequence[int], parts: int) -> dict[str, Any]:
    """Some rows of a step that is made of several micro-batches, without the padding that they do not need."""
    totals: Totals = replace(given["totals"], micro_batches=parts)
    part = pick({**given, "totals": totals}, rows)
    width = max(1, int((part["mask"] * torch.arange(1, part["mask"].shape[1] + 1)).max()))
    return {n: v[:, :width] if isinstance(v, Tensor) and v.dim() == 2 else v for n, v in part.items()}


def joined(recipe: Recipe, given: Mapping[str, Any], cut: Sequence[Sequence[int]]) -> Outcome:
    """The outcome of one step made of micro-batches, each without the padding that it does not need."""
    leaves = leaves_of(given)
    states: States = {}
    loss = torch.zeros((), dtype=torch.float64)
    found: list[dict[str, Metric]] = []
    for rows in cut:
        result = recipe.loss(Batch(**micro_batch({**given, **leaves}, rows, len(cut))), states=states)
        loss, states = loss + result.loss, result.states
        found.append(result.metrics)
    metrics = {name: _join([part[name] for part in found]) for name in found[0]}
    return {"loss": loss.detach(), **gradients_of(loss, leaves), **_metrics(metrics), **numbers_of(states)}


def replaced(recipe: Recipe, old: Bound, new: Bound) -> Recipe:
    """The recipe with another component, or other parameters, in the place of one."""
    return _each_bound(recipe, lambda bound: new if bound == old else bound)


def watched(recipe: Recipe, watch: Callable[[Bound, tuple[Any, ...], Callable[[], Any]], Any]) -> Recipe:
    """The recipe with every call of a component passed through ``watch(bound, arguments, call)``."""

    def through(bound: Bound) -> Bound:
        function = bound.info.function

        def call(*arguments: Any, **parameters: Any) -> Any:
            return watch(bound, arguments, lambda: function(*arguments, **parameters))

        return replace(bound, info=replace(bound.info, function=call))

    return _each_bound(recipe, through)


def _each_bound(recipe: Recipe, change: Callable[[Bound], Bound]) -> Recipe:
    """The recipe with every component changed, those inside others too."""

    def walk(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(walk(item) for item in value)
        if isinstance(value, BoundKL):
            parts = ("estimator", "placement", "controller")
            return replace(value, **{part: walk(getattr(value, part)) for part in parts})
        return change(replace(value, parts=walk(value.parts))) if isinstance(value, Bound) else value

    return replace(recipe, **{f.name: walk(getattr(recipe, f.name)) for f in fields(recipe)})


def _valid(values: Outcome, mask: Tensor) -> Outcome:
    return {name: select(value, mask) if value.shape == mask.shape else value for name, value in values.items()}


def gradients_of(loss: Tensor, leaves: Mapping[str, Tensor]) -> Outcome:
    if not loss.requires_grad:
        return {f"gradient of {name}": torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {f"gradient of {name}": gradient for name, gradient in zip(leaves, found, strict=True)}


def _metrics(metrics: Mapping[str, Metric]) -> Outcome:
    return {f"metric {name}": _number(float(metric)) for name, metric in metrics.items()}


def numbers_of(states: States) -> Outcome:
    """The numbers in the components' states, however deep they lie."""
    return {name: value for key, state in states.items() for name, value in _numbers(f"state {key}", state)}


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        numbers = [item for item in value if isinstance(item, (int, float))]
        yield name, torch.tensor(numbers, dtype=torch.float64)
        for index, item in enumerate(value):
            if not isinstance(item, (int, float)):
                yield from _numbers(f"{name}.{index}", item)
    elif isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, (int, float)):
        yield name, _number(value)


def _join(parts: Sequence[Metric]) -> Metric:
    totals = torch.stack([part.total for part in parts])
    joined = {"mean": totals.sum(), "min": totals.min(), "max": totals.max()}[parts[0].reduce]
    return Metric(joined, torch.stack([part.count for part in parts]).sum(), parts[0].reduce)


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
