"""What a recipe is, for people and for files: its resolved slots, its objective, its models and its row in the table.

Everything here is read off a `Recipe` alone; nothing loads a model or imports trl.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from trl_variants import __version__
from trl_variants.binding import Bound
from trl_variants.objective import defaults_of, formula, formula_text, number
from trl_variants.recipe import BoundKL, Recipe
from trl_variants.slots import SLOTS
from trl_variants.variant import Variant

__all__ = [
    "PARTS",
    "SETTINGS",
    "Model",
    "defaults_of",
    "formula",
    "formula_text",
    "models",
    "needs",
    "number",
    "package_versions",
    "plain",
    "recipe_dict",
    "settings_of",
    "slots_of",
    "table_row",
    "written",
    "written_kl",
]

#: Trainer settings that a variant carries.
SETTINGS = ("num_generations", "num_iterations", "max_updates_per_rollout", "critic", "reshuffle", "sampling")
#: Columns of the variant table: the six parts of an objective (document 002, section 5.6), and what surrounds them.
PARTS = ("baseline", "scaling", "ratio", "clip", "aggregation", "kl", "besides")
_PACKAGES = ("trl", "transformers", "accelerate", "torch", "peft", "vllm")


def slots_of(recipe: Recipe) -> dict[str, tuple[Bound, ...]]:
    """The components of every slot, by the slot's name, in the order of `SLOTS`; the KL slots are empty without KL."""
    filled: dict[str, tuple[Bound, ...]] = {slot: () for slot in SLOTS}
    for bound in recipe.components:
        filled[bound.slot] += () if bound.place else (bound,)
    return filled


# -- as data -----------------------------------------------------------------------------------


def recipe_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved recipe as plain data for JSON: what ``variant.json`` beside a trained model says.

    A slot that takes several components is a list, one that takes one an object. Every parameter is there, whether it
    was set or not.

    Example:
        >>> from trl_variants import resolve
        >>> recipe_dict(resolve("dapo"))["slots"]["clip_rule"]["parameters"]
        {'epsilon_low': 0.2, 'epsilon_high': 0.28}
    """
    filled = slots_of(recipe)
    slots = {
        name: [_component_dict(bound) for bound in filled[name]] if slot.many else _component_dict(filled[name][0])
        for name, slot in SLOTS.items()
        if not name.startswith("kl_")
    }
    kl = recipe.kl
    parts = {} if kl is None else {"estimator": kl.estimator, "placement": kl.placement, "controller": kl.controller}
    return {
        "variant": recipe.variant.name,
        "distribution": recipe.owner and recipe.owner.distribution,
        "version": recipe.owner and (recipe.owner.version or None),
        "summary": recipe.variant.summary,
        "paper": recipe.variant.paper,
        "slots": slots,
        "kl": kl and {"coef": kl.coef, **{name: _component_dict(bound) for name, bound in parts.items()}},
        "settings": settings_of(recipe.variant),
        "versions": _versions(recipe),
    }


def settings_of(variant: Variant) -> dict[str, Any]:
    """The trainer settings of a flattened variant."""
    return {name: getattr(variant, name) for name in SETTINGS}


def _component_dict(bound: Bound) -> dict[str, Any]:
    return {
        "component": bound.name,
        "parameters": {name: plain(value) for name, value in bound.parameters.items()},
        "function": bound.info.path,
        "distribution": bound.owner.distribution,
        "version": bound.owner.version or None,
        "paper": bound.info.paper,
        **({"parts": [[_component_dict(inner) for inner in part] for part in bound.parts]} if bound.parts else {}),
    }


def plain(value: Any) -> Any:
    """A parameter's value as JSON can hold it."""
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def _versions(recipe: Recipe) -> dict[str, str]:
    every = [bound.owner for bound in recipe.components] + ([recipe.owner] if recipe.owner else [])
    owners = {owner.distribution: owner.version for owner in every if owner.version}
    return {**package_versions(), **owners}


def package_versions() -> dict[str, str]:
    """Versions of Python, of this package and of those that a result depends on, as far as they are installed."""
    versions = {"python": platform.python_version(), "trl-variants": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


# -- models and needs --------------------------------------------------------------------------


class Model(NamedTuple):
    """A model that is in memory while a recipe trains."""

    name: str
    trained: bool
    reason: str

    def describe(self) -> str:
        """``policy (trained)``, ``reference (frozen)``."""
        return f"{self.name} ({'trained' if self.trained else 'frozen'})"


def models(recipe: Recipe, reward_model: bool = False) -> list[Model]:
    """Return the models that are resident, and which of them train (documents 000 and 001).

    The policy at the rollout, pi_old, is none: its log-probs are kept, not its weights.

    Args:
        recipe: The recipe.
        reward_model: Whether a reward comes from a model rather than from a function.

    Example:
        >>> from trl_variants import resolve
        >>> [(model.name, model.trained) for model in models(resolve("grpo"))]
        [('policy', True), ('reference', False)]
    """
    resident = [Model("policy", True, "generates the completions and learns from them")]
    if recipe.variant.critic:
        head = "a head on the policy's backbone" if recipe.variant.critic == "shared" else "a model of its own"
        readers = _readers(recipe, ("values", "old_values", "returns"))
        resident.append(Model("critic", True, f"{head}; the values that {readers} read"))
    if recipe.needs_reference:
        readers = _readers(recipe, ("ref_log_probs",))
        resident.append(Model("reference", False, f"the policy as it was at the start, for {readers}"))
    if reward_model:
        resident.append(Model("reward model", False, "scores the completions"))
    return resident


def _readers(recipe: Recipe, inputs: Iterable[str]) -> str:
    names = [bound.name for bound in recipe.components if any(bound.info.needs(name) for name in inputs)]
    return " and ".join(names)


def needs(recipe: Recipe) -> list[str]:
    """Return what the recipe asks of the run, and what it refuses, in sentences."""
    variant, least = recipe.variant, recipe.min_generations
    demanding = ", ".join(b.name for b in recipe.components if b.min_generations == least)
    said = [
        f"At least {least} completions per prompt (num_generations), for {demanding}."
        if least > 1
        else "One completion per prompt is enough (num_generations: 1)."
    ]
    if variant.num_generations is not None:
        said.append(f"Proposes num_generations: {variant.num_generations}; yours wins.")
    if variant.num_iterations and variant.num_iterations > 1:
        said.append(f"Proposes num_iterations: {variant.num_iterations}, epochs over each rollout; yours wins.")
    if variant.reshuffle:
        said.append("Shuffles the rows of a rollout anew before each epoch over them (reshuffle).")
    if most := variant.max_updates_per_rollout:
        steps = "one optimizer step" if most == 1 else f"{most} optimizer steps"
        said.append(f"At most {steps} per rollout; more is refused.")
    if recipe.needs_rollout_log_probs:
        said.append("Scores every rollout once more before learning, for its log-probs.")
    if recipe.needs("greedy_rewards"):
        readers = _readers(recipe, ("greedy_rewards",))
        said.append(f"Generates and scores one greedy completion of each distinct prompt besides, for {readers}.")
    if recipe.needs("entropies"):
        said.append(f"The entropy of every token, with gradient, for {_readers(recipe, ('entropies',))}.")
    if variant.sampling == "resample":
        said.append("Draws further prompts for groups that the filter drops, up to max_rounds (sampling: resample).")
    elif recipe.sample_filters:
        said.append("Rows that the filter drops are masked, not replaced by new ones (sampling: mask).")
    for bound in recipe.components:
        if "sampling_log_probs" in bound.info.optional_inputs:
            if {"log_probs", "old_log_probs"} <= set(bound.info.inputs):
                said.append(
                    f"{bound.name} compares the policy with the generation engine's where it returns log-probs, as "
                    "vLLM does; elsewhere with the policy at the rollout."
                )
            else:
                said.append(f"{bound.name} acts only where the generation engine returns log-probs, as vLLM does.")
        if bound.info.batch_statistic:
            said.append(f"{bound.name} depends on how a step is cut into micro-batches.")
    return said


# -- the table ---------------------------------------------------------------------------------


def table_row(recipe: Recipe) -> dict[str, str]:
    """Return the six parts of document 002 and what surrounds them (``besides``, separated by ``; ``).

    A component stands by its name, with the parameters that differ from their defaults; bounds and discounts always.

    Example:
        >>> from trl_variants import resolve
        >>> row = table_row(resolve("dapo"))
        >>> row["baseline"], row["clip"], row["kl"]
        ('group_mean', 'ppo_clip 0.2/0.28', 'none')
    """
    return {
        "baseline": written(recipe.advantage_estimator, numbers=True),
        "scaling": ", ".join(map(written, recipe.advantage_normalizers)) or "none",
        "ratio": written(recipe.importance_ratio),
        "clip": _written_clip(recipe.clip_rule),
        "aggregation": written(recipe.loss_aggregator),
        "kl": written_kl(recipe.kl),
        "besides": "; ".join(_besides(recipe)),
    }


def written(bound: Bound, *, numbers: bool = False) -> str:
    """A component with the parameters that differ from their defaults, and with all numbers if asked."""
    defaults = defaults_of(bound)
    said = {
        name: value
        for name, value in bound.parameters.items()
        if value != defaults[name] or (numbers and isinstance(value, (int, float)) and not isinstance(value, bool))
    }
    if bound.parts and "parts" in said:
        said["parts"] = [" → ".join(written(inner) for inner in part) for part in bound.parts]
    return " ".join([bound.name, *(f"{name}={number(value)}" for name, value in said.items())])


def written_kl(kl: BoundKL | None) -> str:
    """The KL term in words, such as ``k3 in loss, β 0.04``."""
    if kl is None:
        return "none"
    weighted = kl.placement.parameters.get("weighted")
    times = {True: "ρ·", "detached": "sg[ρ]·"}.get(weighted, "") if weighted else ""
    said = f"{times}{written(kl.estimator)} in {kl.placement.name.replace('_', ' ')}, β {number(kl.coef)}"
    return said if kl.controller.name == "fixed" else f"{said}, {written(kl.controller, numbers=True)}"


def _written_clip(clip: Bound) -> str:
    """A clip rule with its bounds: ``ppo_clip 0.2/0.28``."""
    bounds = [number(value) for name, value in clip.parameters.items() if name.startswith("epsilon")]
    rest = [f"{name}={number(value)}" for name, value in clip.parameters.items() if not name.startswith("epsilon")]
    bounds = bounds[:1] if len(set(bounds)) == 1 else bounds
    return " ".join(filter(None, [clip.name, "/".join(bounds), *rest]))


def _besides(recipe: Recipe) -> list[str]:
    variant = recipe.variant
    said = [f"filter {written(bound)}" for bound in recipe.sample_filters]
    said += [f"reward {written(bound)}" for bound in recipe.reward_shapers]
    said += [f"weight {written(bound)}" for bound in recipe.token_weights]
    said += [f"loss term {written(bound)}" for bound in recipe.regularizers]
    said += [f"critic {variant.critic}"] if variant.critic else []
    said.append(f"G ≥ {recipe.min_generations}")
    said += [f"G = {variant.num_generations}"] if variant.num_generations is not None else []
    said += [f"{variant.num_iterations} epochs"] if variant.num_iterations and variant.num_iterations > 1 else []
    if most := variant.max_updates_per_rollout:
        said.append(f"{most} update{'s' if most > 1 else ''} per rollout")
    return said
