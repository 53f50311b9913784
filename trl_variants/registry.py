"""Registering what plugins offer, and knowing who owns what.

Built-ins and third parties go through the same hooks. A plugin is taken whole or not at all: everything that it
registers is checked before any of it counts.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trl_variants import __version__
from trl_variants.collection import collect, name_of, twice
from trl_variants.declaration import ComponentInfo
from trl_variants.discovery import Owner, import_source, installed_plugins, loaded
from trl_variants.errors import VariantError, did_you_mean, listing
from trl_variants.firstparty import hint
from trl_variants.slots import SLOTS
from trl_variants.variant import Variant

__all__ = ["BrokenPlugin", "Owner", "Registered", "Registry", "load_registry"]

ENVIRONMENT = "TRL_VARIANTS_PLUGINS"
_BUILTINS = "builtins"


@dataclass(frozen=True)
class Registered:
    """A component with its owner."""

    info: ComponentInfo
    owner: Owner

    def __str__(self) -> str:
        return f"{self.info.name} ({self.owner})"


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that could not be loaded, kept so that asking for it can show why."""

    owner: Owner
    error: BaseException


class Registry:
    """What is registered, by slot and name. Build it with `load_registry`."""

    def __init__(self) -> None:
        self._components: dict[str, dict[str, Registered]] = {slot: {} for slot in SLOTS}
        self._variants: dict[str, tuple[Variant, Owner]] = {}
        self._reward_functions: dict[str, tuple[Callable[..., Any], Owner]] = {}
        self._disputed: dict[tuple[str, str], list[Owner]] = {}
        self.plugins: list[Owner] = []
        self.broken: list[BrokenPlugin] = []

    @property
    def variants(self) -> Mapping[str, Variant]:
        """Variants by name."""
        return MappingProxyType({name: variant for name, (variant, _) in self._variants.items()})

    @property
    def reward_functions(self) -> Mapping[str, Callable[..., Any]]:
        """Reward functions by name."""
        return MappingProxyType({name: function for name, (function, _) in self._reward_functions.items()})

    @property
    def disputed(self) -> Mapping[tuple[str, str], list[Owner]]:
        """Names that two plugins register, with both, by slot (or ``variant``, ``reward_function``) and name."""
        return MappingProxyType(self._disputed)

    def owned(self, owner: Owner) -> Iterator[tuple[str, str]]:
        """What a plugin registered and nobody disputes: (slot, name) of components, then ("variant", name)."""
        owners = [(slot, name, r.owner) for slot, found in self._components.items() for name, r in found.items()]
        owners += [("variant", name, whose) for name, (_, whose) in self._variants.items()]
        yield from (
            (slot, name) for slot, name, whose in owners if whose == owner and (slot, name) not in self._disputed
        )

    def components(self, slot: str) -> Mapping[str, Registered]:
        """Components of a slot, by name."""
        if slot not in SLOTS:
            raise VariantError(f"There is no slot '{slot}'.{did_you_mean(slot, SLOTS)} Slots: {listing(SLOTS)}.")
        return MappingProxyType(self._components[slot])

    def component(self, slot: str, name: str) -> Registered:
        """One component, or a `VariantError` with the nearest name and all that exist."""
        registered = self.components(slot)
        self._refuse_disputed(slot, name)
        if name in registered:
            return registered[name]
        elsewhere = [other for other in SLOTS if name in self._components[other]]
        said = f" '{name}' is a {elsewhere[0]}." if elsewhere else hint(name, registered)
        raise self._unknown(
            f"No {slot} named '{name}'.{said} Registered: {listing(sorted(map(str, registered.values())))}."
        )

    def variant(self, name: str) -> Variant:
        """One variant, or a `VariantError` with the nearest name and all that exist."""
        self._refuse_disputed("variant", name)
        if name in self._variants:
            return self._variants[name][0]
        owned = (f"{known} ({owner})" for known, (_, owner) in sorted(self._variants.items()))
        raise self._unknown(f"No variant named '{name}'.{hint(name, self._variants)} Registered: {listing(owned)}.")

    def reward_function(self, name: str) -> Callable[..., Any]:
        """One reward function, or a `VariantError` with the nearest name and all that exist."""
        self._refuse_disputed("reward_function", name)
        if name in self._reward_functions:
            return self._reward_functions[name][0]
        owned = (f"{known} ({owner})" for known, (_, owner) in sorted(self._reward_functions.items()))
        raise self._unknown(
            f"No reward function named '{name}'.{hint(name, self._reward_functions)} Registered: {listing(owned)}."
        )

    def owner(self, slot: str, name: str) -> Owner:
        """Who registered a component first; ``variant`` and ``reward_function`` count as slots here."""
        found = self._known(slot, name) if slot in (*SLOTS, "variant", "reward_function") else None
        return found[1] if found else self.component(slot, name).owner  # which says what is wrong

    def _unknown(self, message: str) -> VariantError:
        """An error for a missing name; broken plugins, which may own it, are named and the first is the cause."""
        if not self.broken:
            return VariantError(message)
        names = listing(f"{b.owner} ({type(b.error).__name__}: {b.error})" for b in self.broken)
        error = VariantError(f"{message} These plugins could not be loaded and may have it: {names}.")
        error.__cause__ = self.broken[0].error
        return error

    def _refuse_disputed(self, kind: str, name: str) -> None:
        owners = self._disputed.get((kind, name))
        if owners:
            raise twice(kind, name, *owners)

    def add(self, plugin: object, owner: Owner, *, strict: bool = True) -> None:
        """Register a plugin, whole or not at all. The same plugin or the same objects again are a no-op.

        Args:
            plugin: A module or object with ``@hookimpl`` functions.
            owner: Who it belongs to.
            strict: Whether a name that another plugin has is an error at once. Otherwise it is one when the name is
                asked for, so that which plugin was found first decides nothing; built-in names are never for others.

        Raises:
            VariantError: It has no hooks, a misspelt hook, an invalid component, or a name that is taken.
        """
        found = collect(plugin, owner)
        disputed = {}
        for kind, name, value in found.named():
            known = self._known(kind, name)
            if known is None or known[1] == owner or known[0] is value or known[0] == value:
                continue
            if strict or known[1].plugin == _BUILTINS:
                raise twice(kind, name, known[1], owner)
            disputed[kind, name] = [known[1], owner]
        for (kind, name), owners in disputed.items():
            self._disputed.setdefault((kind, name), owners)
        for slot, info in found.components:
            self._components[slot.name].setdefault(info.name, Registered(info, owner))
        for variant in found.variants:
            self._variants.setdefault(variant.name, (variant, owner))
        for function in found.reward_functions:
            self._reward_functions.setdefault(name_of(function), (function, owner))
        if owner not in self.plugins:
            self.plugins.append(owner)

    def load(self, source: str) -> None:
        """Load a dotted module or a ``.py`` file that is not installed as a plugin.

        Raises:
            VariantError: It cannot be imported, or registers something wrong.
        """
        try:
            self.add(import_source(source), Owner(source, source, ""))
        except (VariantError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise VariantError(f"The plugin '{source}' could not be loaded: {error!r}") from error

    def _known(self, kind: str, name: str) -> tuple[object, Owner] | None:
        if kind == "variant":
            return self._variants.get(name)
        if kind == "reward_function":
            return self._reward_functions.get(name)
        registered = self._components[kind].get(name)
        return (registered.info.function, registered.owner) if registered else None


def load_registry(plugins: str | Sequence[str] = "auto", *, extra: Iterable[str] = ()) -> Registry:
    """Build a registry: the built-ins, the installed plugins, and any modules or files named besides.

    Args:
        plugins: ``"auto"`` for every installed plugin (or what the variable TRL_VARIANTS_PLUGINS says), ``"none"``,
            or names of installed plugins.
        extra: Dotted modules or ``.py`` files that are plugins without being installed.

    Returns:
        The registry. A broken plugin that was not asked for is a warning; all others still load.

    Raises:
        VariantError: A plugin that was asked for is broken or missing.
    """
    registry = Registry()
    registry.add(importlib.import_module("trl_variants.builtins"), Owner(_BUILTINS, "trl-variants", __version__))
    if plugins == "auto":
        plugins = os.environ.get(ENVIRONMENT, "auto").strip()
    if isinstance(plugins, str) and plugins not in ("auto", "none"):
        plugins = [name.strip() for name in plugins.split(",") if name.strip()]
    installed = installed_plugins()
    names = [point.name for _, point in installed]
    for name in () if isinstance(plugins, str) else plugins:
        if name not in names:
            raise VariantError(
                f"No installed plugin named '{name}'.{did_you_mean(name, names)} Installed: {listing(names)}."
            )
    for owner, point in installed:
        asked = not isinstance(plugins, str) and point.name in plugins
        if not asked and plugins != "auto":
            continue
        try:
            registry.add(loaded(point), owner, strict=asked)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and pytest's Skipped are no Exceptions
            if asked:
                raise VariantError(f"The plugin '{point.name}' of {owner} could not be loaded: {error}") from error
            registry.broken.append(BrokenPlugin(owner, error))
            warnings.warn(f"The plugin '{point.name}' of {owner} could not be loaded: {error!r}", stacklevel=2)
    for source in extra:
        registry.load(source)
    return registry
