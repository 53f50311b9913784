"""The contract that every registered component and variant is held to, built-in or not.

`check_component`, `check_variant` and `check_plugin` run every property of ``properties.py`` that applies. A broken one
raises `NonConformance`, which names the component, what came out and the smallest input tried that shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from trl_variants.conformance.inputs import hosts
from trl_variants.conformance.properties import PROPERTIES
from trl_variants.conformance.running import NonConformance, Subject
from trl_variants.declaration import info_of
from trl_variants.discovery import plugins_named
from trl_variants.errors import VariantError, did_you_mean, listing
from trl_variants.registry import Owner, Registry, load_registry
from trl_variants.resolution import bind, resolve
from trl_variants.slots import SLOTS
from trl_variants.variant import Use, Variant

__all__ = ["PROPERTIES", "NonConformance", "Verdict", "check_component", "check_plugin", "check_variant"]


class Verdict(tuple[str, ...]):
    """The properties that something was held to, each of which it has.

    Attributes:
        exceptions: What excepts it from further ones, by their names: a declaration of its own, or the caller's word.
    """

    exceptions: Mapping[str, str]

    def __new__(cls, held: Iterable[str], exceptions: Mapping[str, str]) -> Verdict:
        made = super().__new__(cls, held)
        made.exceptions = dict(exceptions)
        return made


def check_component(
    slot: str,
    component: str | Callable[..., Any],
    *,
    parameters: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
    excepted: Collection[str] = (),
) -> Verdict:
    """Hold one component to the contract.

    Args:
        slot: The slot that it fills.
        component: The component, or the name of a registered one.
        parameters: Parameters other than its defaults.
        registry: Where names are looked up; the built-ins when left out.
        excepted: Names of properties that it is not held to.

    Returns:
        Its verdict: names of the properties that it was held to, each of which it has.

    Raises:
        NonConformance: It breaks one.
        VariantError: It does not exist, or cannot be used.

    Example:
        >>> "masked_junk_changes_nothing" in check_component("importance_ratio", "sequence")
        True
    """
    registry = registry or load_registry("none")
    info = registry.component(slot, component).info if isinstance(component, str) else info_of(component)
    verdicts: list[Verdict] = []
    use = Use(component, dict(parameters or {}))
    for host in hosts(slot, bind(slot, use, registry), use):
        recipe = resolve(host, registry=registry)
        bound = next(b for b in recipe.components if b.slot == slot and b.name == info.name)
        verdicts.append(_verdict(Subject(recipe, bound), excepted))
    held = dict.fromkeys(name for verdict in verdicts for name in verdict)
    exceptions = {name: why for verdict in verdicts for name, why in verdict.exceptions.items() if name not in held}
    return Verdict(held, exceptions)


def check_variant(
    variant: str | Variant, registry: Registry | None = None, *, excepted: Collection[str] = ()
) -> Verdict:
    """Hold a whole variant to the contract.

    Args:
        variant: The variant, or the name of a registered one.
        registry: Where names are looked up; the built-ins when left out.
        excepted: Names of properties that it is not held to.

    Returns:
        Its verdict: names of the properties that it was held to, each of which it has.

    Raises:
        NonConformance: It breaks one.
        VariantError: It does not exist, or does not resolve.
    """
    return _verdict(Subject(resolve(variant, registry=registry or load_registry("none"))), excepted)


def check_plugin(plugin: object, *, excepted: Mapping[str, Collection[str]] | None = None) -> dict[str, Verdict]:
    """Register a plugin beside the built-ins and hold everything that it registers to the contract.

    Args:
        plugin: A module or object with ``@hookimpl`` functions, or the name of an installed distribution or plugin.
        excepted: Properties to leave out, by the name of a component or variant.

    Returns:
        For each ``slot.name`` and ``variant.name`` its verdict: the properties that it was held to.

    Raises:
        NonConformance: Something breaks a property.
        VariantError: It does not register, or something of it does not resolve.
    """
    if isinstance(plugin, str):
        owners = plugins_named(plugin)
        registry = load_registry([owner.plugin for owner in owners])
    else:
        registry, name = load_registry("none"), str(getattr(plugin, "__name__", type(plugin).__name__))
        owners = [Owner(name, name, "")]
        registry.add(plugin, owners[0])
    excepted = excepted or {}
    return {
        f"{slot}.{name}": check_component(slot, name, registry=registry, excepted=excepted.get(name, ()))
        if slot in SLOTS
        else check_variant(name, registry, excepted=excepted.get(name, ()))
        for owner in owners
        for slot, name in registry.owned(owner)
    }


def _verdict(subject: Subject, excepted: Collection[str]) -> Verdict:
    names = [check.__name__ for check in PROPERTIES]
    unknown = [name for name in excepted if name not in names]
    if unknown:
        raise VariantError(
            f"There is no property '{unknown[0]}'.{did_you_mean(unknown[0], names)} Properties: {listing(names)}."
        )
    found = {check.__name__: _held(check, subject) for check in PROPERTIES if check.__name__ not in excepted}
    exceptions = {name: result for name, result in found.items() if isinstance(result, str)}
    return Verdict(
        (name for name, result in found.items() if result is True),
        {**exceptions, **dict.fromkeys(excepted, "excepted by the caller")},
    )


def _held(check: Callable[[Subject], bool | str], subject: Subject) -> bool | str:
    """What a property says; whatever goes wrong names it, and the input on which it did."""
    try:
        return check(subject)
    except Exception as error:
        given = getattr(error, "inputs", {})
        broken = error if isinstance(error, NonConformance) else error.__cause__  # raised from within a component
        if not isinstance(broken, NonConformance):
            said = str(error) if isinstance(error, VariantError) else f"{type(error).__name__}: {error}"
            broken = subject.fail(said.rstrip("."), given)
        elif broken is not error:
            broken = subject.fail(broken.message, given)
        broken.broken = check.__name__
        broken.args = (f"{broken} [{check.__name__}]",)
        raise broken from (None if isinstance(error, NonConformance) else error)
