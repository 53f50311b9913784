"""What one plugin offers: its hooks called, and everything that they return checked, before any of it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pluggy

from trl_variants import hookspecs
from trl_variants.declaration import ComponentInfo, info_of
from trl_variants.errors import VariantError, did_you_mean, listing
from trl_variants.slots import SLOTS, Slot
from trl_variants.variant import Variant

__all__ = ["Contribution", "check_inputs", "collect", "name_of", "twice"]

_HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("register_"))


@dataclass
class Contribution:
    """Everything that one plugin registers."""

    components: list[tuple[Slot, ComponentInfo]] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    reward_functions: list[Callable[..., Any]] = field(default_factory=list)

    def named(self) -> Iterator[tuple[str, str, object]]:
        """Everything as (slot or kind, name, what it is)."""
        yield from ((slot.name, info.name, info.function) for slot, info in self.components)
        yield from (("variant", variant.name, variant) for variant in self.variants)
        yield from (("reward_function", name_of(function), function) for function in self.reward_functions)


def collect(plugin: object, owner: object) -> Contribution:
    """Call a plugin's hooks and check everything that they return."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name in dir(plugin):
        member = getattr(plugin, name, None)
        marked = manager.parse_hookimpl_opts(plugin, name) is not None
        own = getattr(member, "__module__", None) == _module(plugin)
        looks_meant = marked or (name.startswith("register_") and callable(member) and own)
        if looks_meant and name not in _HOOKS:
            raise VariantError(f"{owner}: there is no hook '{name}'.{did_you_mean(name, _HOOKS)}")
        if looks_meant and not marked:
            raise VariantError(f"{owner}: {name} is not marked. Put @hookimpl above it.")
    try:
        manager.register(plugin)
    except pluggy.PluginValidationError as error:
        raise VariantError(f"{owner}: {error} A registration hook takes no argument.") from error
    found, called = Contribution(), 0
    for hook in _HOOKS:
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            called += 1
            where = f"{owner}: {hook}"
            result = implementation.function()
            if result is None or isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
                raise VariantError(f"{where} returned {type(result).__name__}; it must return a list.")
            for item in result:
                _take(found, hook, item, where)
    names = [(kind, name) for kind, name, _ in found.named()]
    for kind, name in names:
        if names.count((kind, name)) > 1:
            raise twice(kind, name, owner, owner)
    if not called:
        raise VariantError(f"{owner} registers nothing: it has no function marked with @hookimpl.")
    return found


def _module(plugin: object) -> str:
    """The module that a plugin, itself a module, a class or an object, is written in."""
    if isinstance(plugin, ModuleType):
        return plugin.__name__
    return plugin.__module__ if isinstance(plugin, type) else type(plugin).__module__


def _take(found: Contribution, hook: str, item: object, where: str) -> None:
    if hook == "register_variants":
        if not isinstance(item, Variant):
            raise VariantError(f"{where} returned {item!r}, which is not a Variant.")
        found.variants.append(item)
    elif hook == "register_reward_functions":
        if not callable(item):
            raise VariantError(f"{where} returned {item!r}, which is not a reward function.")
        if not name_of(item).isidentifier() or name_of(item) == "partial":
            raise VariantError(f"{where} returned {item!r}, which has no name for a config. Set its __name__.")
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
    if "part_advantages" in info.inputs and "parts" not in info.parameters:
        raise VariantError(f"{slot.name} '{info.name}' names part_advantages, so it must have a parameter parts.")
    clash = [name for name in slot.parameters if name in info.parameters]
    if clash:
        raise VariantError(f"{slot.name} '{info.name}' has a parameter '{clash[0]}', which the slot itself adds.")


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def twice(kind: str, name: str, first: object, second: object) -> VariantError:
    return VariantError(f"{kind} '{name}' is registered by both {first} and {second}.")
