"""Every input that a component asks for and every parameter that it documents does something."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch

from trl_variants.binding import Bound
from trl_variants.conformance.inputs import Case
from trl_variants.conformance.lifetimes import later
from trl_variants.conformance.running import Outcome, Subject, bare, outcome, replaced
from trl_variants.data import Totals
from trl_variants.declaration import Parameter
from trl_variants.errors import VariantError
from trl_variants.slots import SLOTS

__all__ = ["every_input_acts", "every_parameter_acts"]

#: Values that parameters of any kind are tried with; what does not fit is refused where it is bound.
_VALUES: tuple[Any, ...] = (
    *(True, False, None, "first", "second"),
    *(0, 1, 2, 3, 5, 10, 0.5, 0.1, 0.9, 1.5, 2.5, 1e-3, 1e-6, -0.5, -2.0, 100.0),
)
#: Inputs that cost something (a model, a pass, a generation), or without which a component would not be what it is.
_ACTING = frozenset(
    ("values", "final_values", "old_values", "returns", "ref_log_probs", "sampling_log_probs", "entropies")
    + ("greedy_rewards", "advantages", "log_ratio", "token_weights", "per_token_loss", "kl", "kl_coef")
)

#: The outcome of one input with some parameters of the component.
Probe = Callable[[Bound], Outcome]


def every_input_acts(subject: Subject) -> bool:
    """What a component needs that costs something, or that its slot is about, changes what comes out of it."""
    bound = subject.bound
    if bound is None or bound.parts:
        return False
    asked = [name for name in bound.info.inputs if name in _ACTING and bound.info.needs(name)]
    if bound.slot == "kl_estimator":
        asked = list(bound.info.inputs)
    if bound.slot == "kl_placement":
        asked += [name for name in ("kl", "kl_coef") if name not in asked]
    for name in asked:
        if name not in bound.info.inputs or not any(_acts(subject, bound, name)):
            raise subject.fail(f"{name} changes nothing of what it returns", {})
    return bool(asked)


def _acts(subject: Subject, bound: Bound, name: str) -> Iterator[bool]:
    """Whether an input changes what the bare function returns: on some inputs, under some parameters."""
    others = [bound, *(other for p in bound.info.parameters.values() for other in _others(bound, p))]
    for other, case in itertools.product(others, subject.cases()):
        given = case.inputs(bound.slot)
        generator = torch.Generator().manual_seed(5)
        for factor in (0.3, 3.0):
            old = given[name]
            noise = torch.randn(old.shape, generator=generator, dtype=case.dtype) if torch.is_tensor(old) else 1.0
            try:
                yield not _same(bare(other, {**given, name: old + factor * noise}), bare(other, given))
            except ValueError:  # not with this parameter
                continue


def every_parameter_acts(subject: Subject) -> bool | str:
    """Each parameter, at some other value, changes an advantage, a loss, a gradient, a metric or a state.

    The values of a `Literal` each do something of their own. A parameter may need other values of the others to act.
    """
    bound = subject.bound
    if bound is None:
        return False
    probes = _Kept(_probes(subject, bound))
    untried = []
    for parameter in bound.info.parameters.values():
        if bound.parts and parameter.name == "parts":
            continue  # its entries are components, held to the contract themselves
        around = [bound, *_around(bound, parameter)]
        found = ([other.parameters[parameter.name] for other in _others(b, parameter)] for b in around)
        others = next(filter(None, found), [])  # what is accepted beside the others as they are, else as they may be
        trial = _Trial(parameter.name, [bound.parameters[parameter.name], *others], _choices(parameter.annotation))
        trial.run(bound, probes)
        every = [] if trial.done else list(probes)
        for other in around[1:]:
            if not trial.done:
                trial.run(other, every[:: len(every) // 16 + 1])  # from the smallest to the largest
        if not trial.accepted:
            untried.append(parameter.name)
        elif trial.alike:
            raise subject.fail(f"its parameter '{parameter.name}' acts on nothing: {trial}", {})
    if untried:
        return f"no other value of {', '.join(untried)} is accepted, of those that were tried"
    return bool(bound.info.parameters)


class _Kept:
    """Probes, made as far as they are needed, and kept for the next parameter."""

    def __init__(self, source: Iterator[Probe]) -> None:
        self._source, self._made = source, list[Probe]()

    def __iter__(self) -> Iterator[Probe]:
        yield from self._made
        for probe in self._source:
            self._made.append(probe)
            yield probe


class _Trial:
    """Values of one parameter, the one that it has first, and which of them have given the same so far."""

    def __init__(self, name: str, values: list[Any], choices: tuple[Any, ...]) -> None:
        self.name = name
        self.each = any(value in choices for value in values[1:])  # of a Literal, each value is to differ from each
        self.values = [values[0], *(value for value in values[1:] if value in choices or not self.each)]
        self.accepted: set[int] = set()
        self._pairs = {(i, j) for i, j in itertools.combinations(range(len(self.values)), 2) if self.each or not i}

    @property
    def done(self) -> bool:
        """Whether all that is to differ does."""
        return not self._pairs

    @property
    def alike(self) -> list[tuple[int, int]]:
        """Pairs of accepted values that have given the same; none, if any one was to differ and one did."""
        return sorted(pair for pair in self._pairs if {*pair} - {0} <= self.accepted)

    def run(self, bound: Bound, probes: Iterable[Probe]) -> None:
        """Try the values in a component, until all that is to differ does."""
        for probe in probes:
            if self.done:
                return
            found: dict[int, Outcome] = {}
            for index in {index for pair in self._pairs for index in pair}:
                try:
                    parameters = {**bound.parameters, self.name: self.values[index]}
                    bound.info.bind(bound.slot, parameters, SLOTS[bound.slot].parameters)
                    found[index] = probe(replace(bound, parameters=parameters))
                except ValueError:  # refused; VariantError is one
                    continue
            self.accepted |= found.keys() - {0}
            both = [(i, j) for i, j in self._pairs if i in found and j in found]
            apart = {(i, j) for i, j in both if not _same(found[i], found[j])}
            self._pairs = set() if apart and not self.each else self._pairs - apart

    def __str__(self) -> str:
        first = self.alike[0][0]
        same = ", ".join(repr(self.values[j]) for i, j in self.alike if i == first)
        return f"{same} give what {self.values[first]!r} gives"


def _others(bound: Bound, parameter: Parameter) -> Iterator[Bound]:
    """The component with other values of one parameter, as far as they are accepted."""
    value = bound.parameters[parameter.name]
    near = (value / 2, value * 2, value + 1, -value, 1 - value) if type(value) in (int, float) else ()
    seen = [value]
    for other in (*_choices(parameter.annotation), *near, *_VALUES, *_made(parameter.annotation)):
        try:
            own = {**bound.parameters, parameter.name: other}
            parameters = bound.info.bind(bound.slot, own, SLOTS[bound.slot].parameters)
        except VariantError:
            continue
        if parameters[parameter.name] not in seen:
            seen.append(parameters[parameter.name])
            yield replace(bound, parameters=parameters)


def _around(bound: Bound, parameter: Parameter) -> Iterator[Bound]:
    """The component with another value of one of the other parameters."""
    for other in bound.info.parameters.values():
        if other.name not in (parameter.name, "parts"):
            yield from _others(bound, other)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of the Literals in a type."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return arguments
    return tuple(value for argument in arguments for value in _choices(argument)) if _is_union(annotation) else ()


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _made(annotation: Any) -> Iterator[Any]:
    """Lists, tuples and mappings of the type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if _is_union(annotation):
        for argument in arguments:
            yield from _made(argument)
    elif annotation in (list, dict, tuple):
        yield from ([0.5], [1.0, 2.0]) if annotation is not dict else ({"first": 0.5}, {"second": 2.0})
    elif origin is list:
        for value in _scalars(arguments[0]):
            yield from ([value], [value, value], [value] * 3)
    elif origin is tuple and arguments and arguments[-1] is not Ellipsis:
        yield from itertools.islice(itertools.product(*map(_scalars, arguments)), 16)
    elif origin is tuple:
        yield from ((value,) for value in _scalars(arguments[0]))
    elif origin in (dict, Mapping):
        yield from ({key: value} for key in ("first", "second", "all") for value in _scalars(arguments[1]))


def _scalars(annotation: Any) -> tuple[Any, ...]:
    """Some values of a type that stands inside another."""
    found = {float: (0.5, 2.0, -1.0), int: (1, 2, 3), str: ("first", "second"), bool: (True, False)}
    return found.get(annotation) or _choices(annotation) or (*_made(annotation), 0.5, 2, "first")


def _same(a: Outcome, b: Outcome) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(value.double().nan_to_num(nan=-7.0), b[name].double().nan_to_num(nan=-7.0))
        for name, value in a.items()
    )


def _probes(subject: Subject, bound: Bound) -> Iterator[Probe]:
    """Inputs on which parameters may show, in the recipe and in the bare function."""
    for given in _inputs(subject):
        for probe in (partial(_in_recipe, subject, bound, given), partial(_alone, subject, given)):
            try:
                probe(bound)
            except (ValueError, KeyError):  # not for this input, or not without the others
                continue
            yield probe


def _in_recipe(subject: Subject, bound: Bound, given: Mapping[str, Any], other: Bound) -> Outcome:
    """What comes out, and what comes out a step later, when a state has something to remember."""
    recipe = replaced(subject.recipe, bound, other)
    return {**outcome(recipe, given), **{f"later {name}": value for name, value in later(recipe, given).items()}}


def _alone(subject: Subject, given: Mapping[str, Any], other: Bound) -> Outcome:
    """What the bare function gives, whatever the components before it would have made of the inputs."""
    if other.parts:
        raise ValueError("its parts are not run here")
    case = next(subject.cases())
    every = {**Case((len(given["mask"]),), given["mask"].shape[1], case.dtype).inputs(other.slot), **given}
    return bare(other, every)


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
