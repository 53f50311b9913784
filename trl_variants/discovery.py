"""Finding plugins: what is installed, whose it is, and modules and files that are plugins without being installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from zlib import crc32

from trl_variants.errors import VariantError, did_you_mean, listing

__all__ = ["Owner", "import_source", "installed_plugins", "loaded", "module_of", "plugins_named"]

ENTRY_POINT_GROUP = "trl_variants"


@dataclass(frozen=True, order=True)
class Owner:
    """Who registered something."""

    plugin: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()


def installed_plugins() -> list[tuple[Owner, metadata.EntryPoint]]:
    """Every installed plugin, in an order of its own: that in which they were installed or found decides nothing."""
    return sorted(
        ((_owner(point), point) for point in metadata.entry_points(group=ENTRY_POINT_GROUP)), key=lambda pair: pair[0]
    )


def plugins_named(name: str) -> list[Owner]:
    """The installed plugins that have a name, or that a distribution of that name brings.

    Raises:
        VariantError: Nothing that is installed has the name.
    """
    owners = [owner for owner, _ in installed_plugins()]
    found = [owner for owner in owners if name == owner.distribution] or [o for o in owners if name == o.plugin]
    if not found:
        known = sorted({name for owner in owners for name in (owner.distribution, owner.plugin)})
        raise VariantError(
            f"No installed plugin or distribution of plugins named '{name}'.{did_you_mean(name, known)} Installed: "
            f"{listing(known) or 'none'}."
        )
    return found


def module_of(point: metadata.EntryPoint) -> str:
    """The module that an entry point names; "" where its value is none."""
    found = point.pattern.match(point.value)
    return found["module"] if found else ""


def loaded(point: metadata.EntryPoint) -> object:
    """What an entry point names."""
    try:
        return point.load()
    except AttributeError as error:
        if not module_of(point):
            raise VariantError(f"its entry point names no module: {point.value!r}") from error
        raise


def _owner(point: metadata.EntryPoint) -> Owner:
    said = point.dist.metadata if point.dist else ()  # broken metadata may lack either
    name, version = (str(point.dist.metadata[key]) if point.dist and key in said else "" for key in ("Name", "Version"))
    return Owner(point.name, name or point.name, version)


def import_source(source: str) -> ModuleType:
    """Import a dotted module, or a file by its path."""
    if not source.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does: a module beside the config can be named
        return importlib.import_module(source)
    path = Path(source).resolve()
    if not path.is_file():
        raise VariantError(f"There is no plugin file {source}.")
    # The same name in every process, so that what one has pickled another can find.
    name = f"trl_variants_plugin_{path.stem}_{crc32(str(path).encode()):08x}"
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
