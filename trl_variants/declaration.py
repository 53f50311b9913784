"""``@component``: what a function must be to fill a slot, and how its parameters are bound.

A component is a pure function. Its positional parameters name the inputs that it needs, injected by name; one with the
default ``None`` is used where it is there and does without where not. Its keyword-only parameters are its
hyper-parameters, each with a type and a default. The decorator returns the function unchanged, so that it stays an
ordinary callable.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, overload

from trl_variants.errors import VariantError, did_you_mean, listing

__all__ = ["ComponentInfo", "Parameter", "component", "info_of"]

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[Any], "bool | str"]
Least = int | Callable[[Any], int]
Centred = bool | Callable[[Any], bool]
_ATTRIBUTE = "__trl_variants_component__"


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter of a component: its name, type and default."""

    name: str
    annotation: Any
    default: Any

    def convert(self, value: Any, where: str) -> Any:
        """Return ``value`` as this parameter's type, or raise a `VariantError` that names the key.

        A string from YAML such as ``1e-6`` becomes a number; a bool is not taken for a number.
        """
        # Imported here: pydantic is needed only when something is bound, and the package must import quickly.
        from pydantic import ConfigDict, TypeAdapter, ValidationError

        wanted = _type_name(self.annotation)
        members = _members(self.annotation)
        # What Any holds, such as the parts of a blend, is checked by whoever reads it.
        scalars = (lambda item: (item,)) if Any in members else _scalars
        if not {bool, Any} & {*members} and any(isinstance(item, bool) for item in scalars(value)):
            raise VariantError(f"{where} must be {wanted}, not {value!r}.")
        try:
            converted = TypeAdapter(self.annotation, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(
                value
            )
        except ValidationError as error:
            raise VariantError(f"{where} must be {wanted}, not {value!r}.") from error
        if any(isinstance(item, float) and not math.isfinite(item) for item in scalars(converted)):
            raise VariantError(f"{where} must be finite, not {value!r}.")
        return converted


@dataclass(frozen=True)
class ComponentInfo:
    """What ``@component`` knows about a function. See `component` for the fields."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    optional_inputs: frozenset[str]
    parameters: Mapping[str, Parameter]
    paper: str | None = None
    formula: str | None = None
    check: Check | None = None
    min_generations: Least = 1
    group_centred: Centred = False
    batch_statistic: bool = False
    length_weighted: bool = False
    level: Literal["token", "sequence", "one"] = "token"
    after_kl: bool = False

    def needs(self, name: str) -> bool:
        """Whether this component cannot run without the input ``name``."""
        return name in self.inputs and name not in self.optional_inputs

    def least_generations(self, parameters: Mapping[str, Any] | None = None) -> int:
        """``min_generations`` with these parameters, or with the defaults."""
        declared: int = self._declared(self.min_generations, parameters)
        return declared

    def centres_groups(self, parameters: Mapping[str, Any] | None = None) -> bool:
        """``group_centred`` with these parameters, or with the defaults."""
        declared: bool = self._declared(self.group_centred, parameters)
        return declared

    def _declared(self, value: Any, parameters: Mapping[str, Any] | None) -> Any:
        """A declaration that may be a function of the parameters."""
        if not callable(value):
            return value
        if parameters is None:
            parameters = {name: parameter.default for name, parameter in self.parameters.items()}
        return value(SimpleNamespace(**parameters))

    @property
    def path(self) -> str:
        """Where the function is: its module and its name there."""
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"{getattr(self.function, '__module__', '?')}.{name}"

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    def bind(self, slot: str, given: Mapping[str, Any], extra: Mapping[str, float]) -> dict[str, Any]:
        """Fill in defaults, convert types and run ``check``.

        Args:
            slot: Name of the slot, for messages.
            given: Parameters by name, from a variant or a config.
            extra: Parameters that the slot adds, with their defaults.

        Returns:
            Every parameter of the component and of its slot, by name.
        """
        known = {**self.parameters, **{name: Parameter(name, float, default) for name, default in extra.items()}}
        for name in given:
            if name not in known:
                raise VariantError(
                    f"{slot} '{self.name}' has no parameter '{name}'.{did_you_mean(name, known)}"
                    + ("" if did_you_mean(name, known) else f" It has: {listing(known)}.")
                )
        bound = {name: parameter.default for name, parameter in known.items()}
        for name, value in given.items():
            bound[name] = known[name].convert(value, f"{slot} '{self.name}': {name}")
        verdict = self.check(SimpleNamespace(**bound)) if self.check else True
        if verdict is not True:
            raise VariantError(f"{slot} '{self.name}': {verdict or 'its parameters are out of range'}.")
        return bound


_SEEN = ("name", "function", "inputs", "optional_inputs", "parameters")
_DECLARATIONS = tuple(f.name for f in fields(ComponentInfo) if f.name not in _SEEN)


@overload
def component(function: F, /) -> F: ...


@overload
def component(
    *,
    name: str | None = None,
    paper: str | None = None,
    formula: str | None = None,
    check: Check | None = None,
    min_generations: Least = 1,
    group_centred: Centred = False,
    batch_statistic: bool = False,
    length_weighted: bool = False,
    level: Literal["token", "sequence", "one"] = "token",
    after_kl: bool = False,
) -> Callable[[F], F]: ...


def component(function: F | None = None, /, *, name: str | None = None, **declared: Any) -> F | Callable[[F], F]:
    """Declare that a function is a component.

    Args:
        function: The function, when the decorator is used bare.
        name: Name in configs; the function's own by default.
        paper: Address of the paper.
        formula: What it computes, in LaTeX; ``{parameter}`` stands for a parameter's value.
        check: Takes an object with the bound parameters as attributes; returns True, or what is wrong.
        min_generations: Least completions per prompt with which it makes sense: a number, or a function of the bound
            parameters, such as ``lambda p: p.k``.
        group_centred: A group of equal rewards gives exactly 0: True, or a function of the bound parameters.
        batch_statistic: Depends by definition on the micro-batch or the step, so the cut may change it.
        length_weighted: Means to weigh sequences by their length.
        level: For importance ratios: one per token, one per sequence, or the constant one.
        after_kl: For reward shapers: runs after KL entered the reward.

    Raises:
        VariantError: The signature is not that of a component.

    Example:
        >>> @component(paper="https://arxiv.org/abs/1707.06347")
        ... def halve(advantages, *, factor: float = 0.5):
        ...     return factor * advantages
        >>> halve(4.0)
        2.0
        >>> info_of(halve).inputs, dict(info_of(halve).parameters)["factor"].default
        (('advantages',), 0.5)
    """

    for key in declared:
        if key not in _DECLARATIONS:
            raise VariantError(
                f"@component has no argument '{key}'.{did_you_mean(key, _DECLARATIONS)} "
                f"Arguments: name, {listing(_DECLARATIONS)}."
            )

    def decorate(target: F) -> F:
        setattr(target, _ATTRIBUTE, _inspect(target, name or target.__name__, declared))
        return target

    return decorate if function is None else decorate(function)


def info_of(target: object) -> ComponentInfo:
    """Return what ``@component`` recorded, or raise a `VariantError`."""
    info = getattr(target, _ATTRIBUTE, None)
    if not isinstance(info, ComponentInfo):
        raise VariantError(f"{target!r} is not a component. Put @component above its definition.")
    return info


def _inspect(target: Callable[..., Any], name: str, declared: Mapping[str, Any]) -> ComponentInfo:
    try:
        signature = inspect.signature(target, eval_str=True)
    except NameError as error:
        raise VariantError(f"component '{name}': its annotations cannot be read ({error}).") from error
    inputs: list[str] = []
    optional: set[str] = set()
    parameters: dict[str, Parameter] = {}
    for p in signature.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise VariantError(f"component '{name}' takes *{p.name}; name its inputs and parameters one by one.")
        if p.kind is p.KEYWORD_ONLY:
            if p.default is p.empty or p.annotation is p.empty:
                raise VariantError(f"component '{name}': parameter '{p.name}' needs a type and a default.")
            parameters[p.name] = Parameter(p.name, p.annotation, p.default)
            continue
        if p.default is None:
            optional.add(p.name)
        elif p.default is not p.empty:
            raise VariantError(
                f"component '{name}': '{p.name}' has a default, so it is a parameter; put it after a bare *."
            )
        inputs.append(p.name)
    return ComponentInfo(
        name=name,
        function=target,
        inputs=tuple(inputs),
        optional_inputs=frozenset(optional),
        parameters=MappingProxyType(parameters),
        **declared,
    )


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself; the types of a Literal's values."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return tuple(type(value) for value in arguments)
    return tuple(m for a in arguments for m in _members(a)) if arguments else (annotation,)


def _scalars(value: Any) -> Iterator[Any]:
    """The values inside lists and mappings, or the value itself."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _scalars(item)
    else:
        yield value


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(value) for value in annotation.__args__)
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a string", type(None): "null"}
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type_name(a) for a in get_args(annotation))
    return names.get(annotation, str(annotation))
