"""TRL's own reward functions, through the hook that plugins use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from trl import rewards

from trl_variants.hookspecs import hookimpl
from trl_variants.registry import Owner, Registry

__all__ = ["add_trl", "register_reward_functions"]


@hookimpl
def register_reward_functions() -> list[Callable[..., Any]]:
    # Names that begin with get_ make a reward function, and are none.
    names = (name for name in rewards.__all__ if name.endswith("_reward") and not name.startswith("get_"))
    return [getattr(rewards, name) for name in names]


def add_trl(registry: Registry) -> Registry:
    """Register TRL's reward functions; a name that a plugin has too is disputed."""
    registry.add(sys.modules[__name__], Owner("trl", "trl", metadata.version("trl")), strict=False)
    return registry
