"""Every documented parameter does something: another value of it changes what comes out, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args, get_origin

import torch

from trl_variants.binding import Bound
from trl_variants.conformance.inputs import Case
from trl_variants.conformance.lifetimes import later
from trl_variants.conformance.running import Outcome, Subject, bare, outcome, replaced
from trl_variants.data import Totals
from trl_variants.declaration import Parameter
from trl_variants.errors import VariantError
from trl_variants.slots import SLOTS

__all__ = ["every_parameter_acts"]

#: Values that parameters of any kind are tried with; what does not fit is refused where it is bound.
_VALUES: tuple[Any, ...] = (
    *(True, False, None, "first", "second"),
    *(0, 1, 2, 3, 5, 10, 0.5, 0.1, 0.9, 1.5, 2.5, 1e-3, 1e-6, -0.5, -2.0, 100.0),
    *([0.5], [0.5, 0.5], [1.0, 2.0]),
)


#: The outcome of one input with some parameters of the component.
Probe = Callable[[Bound], Outcome]


def every_parameter_acts(subject: Subject) -> bool:
    """Each parameter, at some other value, changes an advantage, a loss, a gradient, a metric or a state."""
    bound = subject.bound
    if bound is None:
        return False
    found: list[tuple[Probe, Outcome]] = []
    probes = _probes(subject, bound)
    for parameter in bound.info.parameters.values():
        if bound.parts and parameter.name == "parts":
            continue  # its entries are components, held to the contract themselves
        others = list(_others(bound, parameter))
        if others and not any(_differs(probe, others, before) for probe, before in _again(found, probes)):
            tried = ", ".join(repr(other.parameters[parameter.name]) for other in others)
            default = bound.parameters[parameter.name]
            raise subject.fail(
                f"its parameter '{parameter.name}' acts on nothing: {tried} give what {default!r} gives", {}
            )
    return bool(bound.info.parameters)


def _others(bound: Bound, parameter: Parameter) -> Iterator[Bound]:
    """The component with other values of one parameter, as far as they are accepted."""
    value = bound.parameters[parameter.name]
    literals = get_args(parameter.annotation) if get_origin(parameter.annotation) is Literal else ()
    near = (value / 2, value * 2, value + 1, -value, 1 - value) if type(value) in (int, float) else ()
    seen = [value]
    for other in (*literals, *near, *_VALUES):
        try:
            own = {**bound.parameters, parameter.name: other}
            parameters = bound.info.bind(bound.slot, own, SLOTS[bound.slot].parameters)
        except VariantError:
            continue
        if parameters[parameter.name] not in seen:
            seen.append(parameters[parameter.name])
            yield replace(bound, parameters=parameters)


def _again(found: list[tuple[Probe, Outcome]], probes: Iterator[tuple[Probe, Outcome]]) -> Iterator[Any]:
    """The probes that were made already, then further ones as far as they are needed."""
    yield from found
    for probe in probes:
        found.append(probe)
        yield probe


def _differs(probe: Probe, others: list[Bound], before: Outcome) -> bool:
    for other in others:
        try:
            after = probe(other)
        except ValueError:  # refused for this input; VariantError is one
            return True
        if after.keys() != before.keys() or not all(
            torch.equal(value.nan_to_num(nan=-7.0), after[name].nan_to_num(nan=-7.0)) for name, value in before.items()
        ):
            return True
    return False


def _probes(subject: Subject, bound: Bound) -> Iterator[tuple[Probe, Outcome]]:
    """Inputs on which parameters may show, in the recipe and in the bare function, each with what comes out now."""
    for given in _inputs(subject):
        for probe in (partial(_in_recipe, subject, bound, given), partial(_alone, subject, given)):
            try:
                yield probe, probe(bound)
            except (ValueError, KeyError):  # not for this input, or not without the others
                continue


def _in_recipe(subject: Subject, bound: Bound, given: Mapping[str, Any], other: Bound) -> Outcome:
    """What comes out, and what comes out a step later, when a state has something to remember."""
    recipe = replaced(subject.recipe, bound, other)
    return {**outcome(recipe, given), **{f"later {name}": value for name, value in later(recipe, given).items()}}


def _alone(subject: Subject, given: Mapping[str, Any], other: Bound) -> Outcome:
    """What the bare function gives, whatever the components before it would have made of the inputs."""
    case = next(subject.cases())
    every = {**Case((len(given["mask"]),), given["mask"].shape[1], case.dtype).inputs(other.slot), **given}
    return {} if other.parts or "mask" not in every else bare(other, every)


def _inputs(subject: Subject) -> Iterator[dict[str, Any]]:
    least = max(subject.recipe.min_generations, 2)
    wide = Case((least + 2, least + 6), 24)
    for case in (*subject.cases(), wide):
        for given in subject.inputs(case):
            yield given
            if "group_ids" in given:
                yield from _other_rollouts(given)
            else:
                yield from _other_batches(given)


def _other_rollouts(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    same = torch.full_like(given["rewards"], 0.7, dtype=torch.float32)
    for rewards in (same, (given["rewards"] > 0).to(given["rewards"]), 10 * given["rewards"], given["rewards"].abs()):
        yield {**given, "rewards": rewards, "rewards_per_func": rewards[:, None].expand(-1, 2).clone()}
    yield {**given, "scored": torch.arange(len(given["rewards"])) % 3 > 0}
    yield {**given, "max_length": 2 * given["max_length"], "truncated": torch.zeros_like(given["truncated"])}


def _other_batches(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    others = ("old_log_probs", "ref_log_probs", "sampling_log_probs")
    away: dict[str, Any] = {name: given[name] for name in others if name in given}
    for by in (0.03, 3.0, 10.0):  # how far the policy is from the others
        moved = {name: given["log_probs"] + by * (value - given["log_probs"]) for name, value in away.items()}
        yield {**given, **moved}
    empty = torch.zeros_like(given["mask"])
    empty[1:] = given["mask"][1:]
    yield {**given, "mask": empty, "totals": Totals.of(empty)}
    for by in (0.1, 10.0, -1.0):
        yield {**given, **{name: by * given[name] for name in ("advantages", "entropies") if name in given}}
