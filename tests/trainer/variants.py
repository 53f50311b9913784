"""Every registered variant."""

from __future__ import annotations

from trl_variants import load_registry, resolve

REGISTRY = load_registry("none")
RECIPES = {name: resolve(name, None, REGISTRY) for name in REGISTRY.variants}
VARIANTS = list(RECIPES)
#: Variants that may use a rollout for more than one optimizer step.
REUSING = [name for name in VARIANTS if RECIPES[name].variant.max_updates_per_rollout is None]
