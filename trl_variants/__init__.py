"""Variants of policy-gradient training as combinations of plugins, on TRL's trainer.

Everything that a user or a plugin needs is here; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_variants.components.masked import at_last_token as at_last_token
    from trl_variants.components.masked import bounded_exp as bounded_exp
    from trl_variants.components.masked import discounted_sum as discounted_sum
    from trl_variants.components.masked import following as following
    from trl_variants.components.masked import group_table as group_table
    from trl_variants.components.masked import is_constant as is_constant
    from trl_variants.components.masked import masked_mean as masked_mean
    from trl_variants.components.masked import masked_std as masked_std
    from trl_variants.components.masked import masked_sum as masked_sum
    from trl_variants.components.masked import select as select
    from trl_variants.components.masked import to_tokens as to_tokens
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

_NAMES = {
    "components.masked": (
        "at_last_token",
        "bounded_exp",
        "discounted_sum",
        "following",
        "group_table",
        "is_constant",
        "masked_mean",
        "masked_std",
        "masked_sum",
        "select",
        "to_tokens",
    ),
    "data": ("Advantages", "Batch", "ClipResult", "Rollout", "Totals"),
    "declaration": ("component",),
    "errors": ("VariantError",),
    "hookspecs": ("hookimpl",),
    "recipe": ("Recipe",),
    "registry": ("load_registry",),
    "resolution": ("resolve",),
    "trainer.config": ("VariantConfig",),
    "trainer.trainer": ("VariantTrainer",),
    "variant": ("KL", "Variant", "use"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
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
