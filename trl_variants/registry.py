"""Finding plugins, registering what they offer, and knowing who owns what.

Built-ins and third parties go through the same hooks. A plugin is taken whole or not at all: everything that it
registers is checked before any of it counts.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pluggy

from trl_variants import __version__, hookspecs
from trl_variants.declaration import ComponentInfo, info_of
from trl_variants.errors import VariantError, did_you_mean, listing
from trl_variants.slots import SLOTS, Slot
from trl_variants.variant import Variant

__all__ = ["BrokenPlugin", "Owner", "Registered", "Registry", "load_registry"]

ENTRY_POINT_GROUP = "trl_variants"
ENVIRONMENT = "TRL_VARIANTS_PLUGINS"
_HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("register_"))


@dataclass(frozen=True)
class Owner:
    """Who registered something."""

    plugin: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()


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


@dataclass
class _Contribution:
    """Everything that one plugin registers."""

    components: list[tuple[Slot, ComponentInfo]] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    reward_functions: list[Callable[..., Any]] = field(default_factory=list)


class Registry:
    """What is registered, by slot and name. Build it with `load_registry`."""

    def __init__(self) -> None:
        self._components: dict[str, dict[str, Registered]] = {slot: {} for slot in SLOTS}
        self._variants: dict[str, tuple[Variant, Owner]] = {}
        self._reward_functions: dict[str, tuple[Callable[..., Any], Owner]] = {}
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

    def components(self, slot: str) -> Mapping[str, Registered]:
        """Components of a slot, by name."""
        if slot not in SLOTS:
            raise VariantError(f"There is no slot '{slot}'.{did_you_mean(slot, SLOTS)} Slots: {listing(SLOTS)}.")
        return MappingProxyType(self._components[slot])

    def component(self, slot: str, name: str) -> Registered:
        """One component, or a `VariantError` with the nearest name and all that exist."""
        registered = self.components(slot)
        if name in registered:
            return registered[name]
        elsewhere = [other for other in SLOTS if name in self._components[other]]
        hint = f" '{name}' is a {elsewhere[0]}." if elsewhere else did_you_mean(name, registered)
        raise self._unknown(
            f"No {slot} named '{name}'.{hint} Registered: {listing(sorted(map(str, registered.values())))}."
        )

    def variant(self, name: str) -> Variant:
        """One variant, or a `VariantError` with the nearest name and all that exist."""
        if name in self._variants:
            return self._variants[name][0]
        owned = (f"{known} ({owner})" for known, (_, owner) in sorted(self._variants.items()))
        raise self._unknown(
            f"No variant named '{name}'.{did_you_mean(name, self._variants)} Registered: {listing(owned)}."
        )

    def owner(self, slot: str, name: str) -> Owner:
        """Who registered a component; for ``slot="variant"``, a variant."""
        return self._variants[name][1] if slot == "variant" else self.component(slot, name).owner

    def _unknown(self, message: str) -> VariantError:
        """An error for a missing name; broken plugins, which may own it, are named and the first is the cause."""
        if not self.broken:
            return VariantError(message)
        names = listing(f"{b.owner} ({type(b.error).__name__}: {b.error})" for b in self.broken)
        error = VariantError(f"{message} These plugins could not be loaded and may have it: {names}.")
        error.__cause__ = self.broken[0].error
        return error

    def add(self, plugin: object, owner: Owner) -> None:
        """Register a plugin, whole or not at all. The same objects again are a no-op.

        Args:
            plugin: A module or object with ``@hookimpl`` functions.
            owner: Who it belongs to.

        Raises:
            VariantError: It has no hooks, a misspelt hook, an invalid component, or a name that is taken.
        """
        found = _collect(plugin, owner)
        for slot, info in found.components:
            taken = self._components[slot.name].get(info.name)
            if taken and taken.info.function is not info.function:
                raise VariantError(f"{slot.name} '{info.name}' is registered by both {taken.owner} and {owner}.")
        for variant in found.variants:
            known = self._variants.get(variant.name)
            if known and known[0] != variant:
                raise VariantError(f"variant '{variant.name}' is registered by both {known[1]} and {owner}.")
        for function in found.reward_functions:
            other = self._reward_functions.get(_name_of(function))
            if other and other[0] is not function:
                raise VariantError(
                    f"reward_function '{_name_of(function)}' is registered by both {other[1]} and {owner}."
                )
        for slot, info in found.components:
            self._components[slot.name].setdefault(info.name, Registered(info, owner))
        for variant in found.variants:
            self._variants.setdefault(variant.name, (variant, owner))
        for function in found.reward_functions:
            self._reward_functions.setdefault(_name_of(function), (function, owner))
        self.plugins.append(owner)


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
    registry.add(importlib.import_module("trl_variants.builtins"), Owner("builtins", "trl-variants", __version__))
    if plugins == "auto":
        plugins = os.environ.get(ENVIRONMENT, "auto")
    if isinstance(plugins, str) and plugins not in ("auto", "none"):
        plugins = [name.strip() for name in plugins.split(",") if name.strip()]
    installed = {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    wanted = [] if plugins == "none" else list(installed) if plugins == "auto" else list(plugins)
    for name in wanted:
        if name not in installed:
            raise VariantError(
                f"No installed plugin named '{name}'.{did_you_mean(name, installed)} Installed: {listing(installed)}."
            )
        point = installed[name]
        distribution = point.dist
        owner = Owner(
            name, distribution.name if distribution else name, str(distribution.version) if distribution else ""
        )
        try:
            registry.add(point.load(), owner)
        except Exception as error:
            if plugins != "auto":
                raise VariantError(f"The plugin '{name}' of {owner} could not be loaded: {error}") from error
            registry.broken.append(BrokenPlugin(owner, error))
            warnings.warn(f"The plugin '{name}' of {owner} could not be loaded: {error!r}", stacklevel=2)
    for source in extra:
        try:
            module = _import(source)
        except VariantError:
            raise
        except Exception as error:
            raise VariantError(f"The plugin '{source}' could not be loaded: {error!r}") from error
        registry.add(module, Owner(source, source, ""))
    return registry


def _import(source: str) -> ModuleType:
    """Import a dotted module, or a file by its path."""
    if not source.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does: a module beside the config can be named
        return importlib.import_module(source)
    path = Path(source).resolve()
    if not path.is_file():
        raise VariantError(f"There is no plugin file {source}.")
    name = f"trl_variants_plugin_{path.stem}_{abs(hash(str(path)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise VariantError(f"{source} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _collect(plugin: object, owner: Owner) -> _Contribution:
    """Call a plugin's hooks and check everything that they return."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name in dir(plugin):
        member = getattr(plugin, name, None)
        if not name.startswith("register_") or not callable(member):
            continue
        if name not in _HOOKS:
            raise VariantError(f"{owner} has no valid hook '{name}'.{did_you_mean(name, _HOOKS)}")
        if manager.parse_hookimpl_opts(plugin, name) is None:
            raise VariantError(f"{owner}: {name} is not marked. Put @hookimpl above it.")
    try:
        manager.register(plugin, name=owner.plugin)
    except pluggy.PluginValidationError as error:
        raise VariantError(f"{owner}: {error} A registration hook takes no argument.") from error
    found, called = _Contribution(), 0
    for hook in _HOOKS:
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            called += 1
            where = f"{owner}: {hook}"
            result = implementation.function()
            if result is None or isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
                raise VariantError(f"{where} returned {type(result).__name__}; it must return a list.")
            for item in result:
                _take(found, hook, item, where)
    if not called:
        raise VariantError(f"{owner} registers nothing: it has no function marked with @hookimpl.")
    return found


def _take(found: _Contribution, hook: str, item: object, where: str) -> None:
    if hook == "register_variants":
        if not isinstance(item, Variant):
            raise VariantError(f"{where} returned {item!r}, which is not a Variant.")
        found.variants.append(item)
    elif hook == "register_reward_functions":
        if not callable(item):
            raise VariantError(f"{where} returned {item!r}, which is not a reward function.")
        found.reward_functions.append(item)
    else:
        slot = next(slot for slot in SLOTS.values() if slot.hook == hook)
        try:
            info = info_of(item)
            check_inputs(slot, info)
        except VariantError as error:
            raise VariantError(f"{where}: {error}") from error
        found.components.append((slot, info))


def check_inputs(slot: Slot, info: ComponentInfo) -> None:
    """Raise a `VariantError` if the component names an input that its slot does not have."""
    for name in info.inputs:
        if name not in slot.inputs:
            raise VariantError(
                f"{slot.name} '{info.name}' names the input '{name}', which this slot does not have."
                f"{did_you_mean(name, slot.inputs)} It may name: {listing(slot.inputs)}."
            )
    clash = [name for name in slot.parameters if name in info.parameters]
    if clash:
        raise VariantError(f"{slot.name} '{info.name}' has a parameter '{clash[0]}', which the slot itself adds.")


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
