"""Variants of policy-gradient training as combinations of plugins, on TRL's trainer.

Everything that a user or a plugin needs is here; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_variants.data import Advantages as Advantages
    from trl_variants.data import Batch as Batch
    from trl_variants.data import ClipResult as ClipResult
    from trl_variants.data import Rollout as Rollout
    from trl_variants.data import Totals as Totals
    from trl_variants.declaration import component as component
    from trl_variants.errors import VariantError as VariantError
    from trl_variants.hookspecs import hookimpl as hookimpl
    from trl_variants.recipe import Recipe as Recipe
    from trl_variants.registry import load_registry as load_registry
    from trl_variants.resolution import resolve as resolve
    from trl_variants.trainer.config import VariantConfig as VariantConfig
    from trl_variants.trainer.trainer import VariantTrainer as VariantTrainer
    from trl_variants.variant import KL as KL
    from trl_variants.variant import Variant as Variant
    from trl_variants.variant import use as use

_HOMES = {
    "Advantages": "data",
    "Batch": "data",
    "ClipResult": "data",
    "KL": "variant",
    "Recipe": "recipe",
    "Rollout": "data",
    "Totals": "data",
    "Variant": "variant",
    "VariantConfig": "trainer.config",
    "VariantError": "errors",
    "VariantTrainer": "trainer.trainer",
    "component": "declaration",
    "hookimpl": "hookspecs",
    "load_registry": "registry",
    "resolve": "resolution",
    "use": "variant",
}
__all__ = list(_HOMES)  # noqa: PLE0605
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trl_variants' has no attribute '{name}'")
    # No module of the package has the name of one of these: importing it would put the module in the name's place.
    value = getattr(importlib.import_module(f"trl_variants.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
