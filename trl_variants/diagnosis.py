"""What is wrong with what is installed: broken, disputed, shadowed or incompatible plugins, and broken contracts."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement

from trl_variants.conformance import NonConformance, Verdict, check_component, check_variant
from trl_variants.discovery import installed_plugins, module_of
from trl_variants.errors import VariantError
from trl_variants.registry import Owner, Registry, load_registry
from trl_variants.slots import SLOTS

__all__ = ["Diagnosis", "Problem", "diagnose"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: ``broken``: cannot be loaded; ``disputed``: two plugins register one name; ``shadowed``: another module of
            the same name is imported in its place; ``incompatible``: what it requires is installed in another version;
            ``contract``: a component or a variant breaks a property.
        owner: Whose it is.
        message: What is wrong, and where.
    """

    kind: Literal["broken", "disputed", "shadowed", "incompatible", "contract"]
    owner: Owner
    message: str


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        registry: Everything that could be loaded.
        verdicts: For each plugin and each ``slot.name`` and ``variant.name`` of it, its verdict.
        problems: What is wrong.
    """

    registry: Registry
    verdicts: dict[Owner, dict[str, Verdict]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def diagnose(
    *, extra: tuple[str, ...] = (), contract: bool = True, watch: Callable[[Owner, str], None] = lambda *_: None
) -> Diagnosis:
    """Load everything that is installed and hold it to the contract.

    Args:
        extra: Modules or files to load besides.
        contract: Whether the conformance kit runs; without it only loading, names and versions are looked at.
        watch: Told the owner and the name of each component and variant before it is checked.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The plugin '", category=UserWarning)
        registry = load_registry(extra=extra)
    found = Diagnosis(registry)
    for broken in registry.broken:
        found.problems.append(Problem("broken", broken.owner, f"{type(broken.error).__name__}: {broken.error}"))
    for (kind, name), owners in registry.disputed.items():
        others = " and ".join(map(str, owners))
        found.problems.append(Problem("disputed", owners[-1], f"{kind} '{name}' is registered by both {others}"))
    found.problems += _unmet("trl-variants", registry.plugins[0])
    for owner, point in installed_plugins():
        found.problems += _unmet(owner.distribution, owner)
        found.problems += _shadowed(owner, point)
    if contract:
        for owner in registry.plugins:
            verdicts = found.verdicts[owner] = {}
            for slot, name in registry.owned(owner):
                watch(owner, f"{slot} '{name}'")
                try:
                    verdicts[f"{slot}.{name}"] = _checked(slot, name, registry)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # whatever a component raises; SystemExit is no Exception
                    known = isinstance(error, (NonConformance, VariantError))
                    told = str(error) if known else f"{slot} '{name}': {error!r}"
                    found.problems.append(Problem("contract", owner, told))
    return found


def _checked(slot: str, name: str, registry: Registry) -> Verdict:
    return check_component(slot, name, registry=registry) if slot in SLOTS else check_variant(name, registry)


def _unmet(distribution: str, owner: Owner) -> Iterator[Problem]:
    """Requirements of a distribution that are installed in a version it does not take, or not at all."""
    try:
        required = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:  # a module that is not installed
        return
    for text in required:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            yield Problem("incompatible", owner, f"its requirement {text!r} cannot be read: {error}".splitlines()[0])
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Problem("incompatible", owner, f"requires {requirement}, which is not installed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield Problem("incompatible", owner, f"requires {requirement}; {installed} is installed")


def _shadowed(owner: Owner, point: metadata.EntryPoint) -> Iterator[Problem]:
    """A module of the plugin's name that lies elsewhere than where its distribution put it."""
    if not (module := module_of(point)):
        return
    place = module.replace(".", "/")
    own = [f for f in point.dist.files or () if str(f) in (f"{place}.py", f"{place}/__init__.py")] if point.dist else []
    try:
        found = importlib.import_module(module).__file__
    except KeyboardInterrupt:
        raise
    except BaseException:  # broken, which is told already
        return
    if own and found and Path(own[0].locate()).resolve() != Path(found).resolve():
        yield Problem("shadowed", owner, f"{found} is imported in place of {own[0].locate()}")
