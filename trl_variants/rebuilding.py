"""A variant made again from the ``variant.json`` of a run: the same components with the same parameters."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from trl_variants.errors import VariantError
from trl_variants.registry import Owner, Registry
from trl_variants.slots import SLOTS
from trl_variants.variant import KL, Use, Variant

__all__ = ["is_file", "owner_in", "read", "rebuilt", "settings_of_run"]


def is_file(variant: object) -> bool:
    """Whether a variant is named by the file that a run has written."""
    return isinstance(variant, str) and variant.endswith(".json")


def read(path: str | Path) -> dict[str, Any]:
    """What a ``variant.json`` says.

    Raises:
        VariantError: There is no such file, or it is not one.
    """
    try:
        said = json.loads(Path(path).read_text())
    except FileNotFoundError as error:
        raise VariantError(f"There is no file {path}.") from error
    except ValueError as error:
        raise VariantError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(said, dict) or not {"variant", "slots", "kl", "settings"} <= said.keys():
        raise VariantError(f"{path} is no variant.json: a run writes that beside its model.")
    return said


def settings_of_run(path: str | Path) -> dict[str, Any]:
    """The settings of the run that wrote a ``variant.json``, with its very recipe as the variant.

    Raises:
        VariantError: The run was started from Python, so that its settings are in no file.
    """
    settings = read(path).get("run")
    if not settings:
        raise VariantError(
            f"{path} holds a recipe only, as the run was not started by `trl-variants train`. Write the other "
            f"settings into a YAML file, with variant: {path}."
        )
    return {**{key: value for key, value in settings.items() if key != "variant_overrides"}, "variant": str(path)}


def owner_in(path: str) -> Owner | None:
    """Who had registered the variant of a ``variant.json``."""
    said = read(path)
    name = said.get("distribution")
    return Owner(name, name, said.get("version") or "") if name else None


def rebuilt(path: str, registry: Registry) -> Variant:
    """The variant of a run, whatever its name and its defaults have become since.

    Args:
        path: The run's ``variant.json``.
        registry: Has the components. A module or a file that the run had loaded besides is loaded here too.

    Returns:
        A variant that extends none.

    Raises:
        VariantError: A component is neither registered nor where it was.
    """
    said = read(path)
    moved: set[str] = set()

    def use(slot: str, entry: Mapping[str, Any]) -> Use:
        parameters = dict(entry["parameters"])
        if parts := entry.get("parts"):
            # Each with all of its parameters, where ``parts`` among the parameters says only what differed.
            parameters["parts"] = [
                {
                    "advantage_estimator": use("advantage_estimator", estimator),
                    "advantage_normalizer": [use("advantage_normalizer", normalizer) for normalizer in normalizers],
                }
                for estimator, *normalizers in parts
            ]
        return Use(_component(slot, entry, registry, moved), parameters)

    slots: dict[str, Any] = {
        slot: tuple(use(slot, item) for item in entry) if SLOTS[slot].many else use(slot, entry)
        for slot, entry in said["slots"].items()
    }
    kl = None
    if said["kl"] is not None:
        parts: dict[str, Any] = {
            part: use(f"kl_{part}", said["kl"][part]) for part in ("estimator", "placement", "controller")
        }
        kl = KL(**parts, coef=said["kl"]["coef"])
    known = {f.name for f in fields(Variant)}
    settings = {name: value for name, value in said["settings"].items() if name in known}
    made = Variant(name=said["variant"], summary=said["summary"], paper=said["paper"], kl=kl, **slots, **settings)
    if moved:
        warnings.warn(f"{path} was written with other versions: {'; '.join(sorted(moved))}.", stacklevel=2)
    return made


def _component(slot: str, entry: Mapping[str, Any], registry: Registry, moved: set[str]) -> Any:
    """The component by its name, or the function that it was."""
    name, source, version = entry["component"], entry["distribution"], entry["version"]

    def is_it() -> bool:
        """Whether what is registered under the name is meant: a function given itself may have another one's name."""
        known = registry.components(slot).get(name)
        return known is not None and bool(
            version or known.owner.distribution == source or known.info.path == entry["function"]
        )

    if not is_it() and version is None:
        try:
            registry.load(source)
        except VariantError:  # no plugin: the function itself was given
            if source.endswith(".py"):
                raise
    if is_it():
        owner = registry.owner(slot, name)
        if version and owner.version != version:
            moved.add(f"{source} {version}, and {owner} is installed")
        return name
    module, _, attribute = entry["function"].rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        registry.component(slot, name)  # raises, with the nearest name, unless another one has the name
        raise VariantError(f"{slot} '{name}' was {entry['function']}, which is not there: {error}.") from error
