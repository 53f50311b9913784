"""From a variant's name and a config's overrides to a `Recipe`: all validation, and its messages.

Nothing here loads a model. What `resolve` accepts can run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trl_variants.binding import Bound
from trl_variants.collection import check_inputs
from trl_variants.declaration import info_of
from trl_variants.errors import VariantError, did_you_mean, listing
from trl_variants.overrides import VARIANT_SLOTS, apply_overrides, as_list, as_use, is_off, override_slot
from trl_variants.rebuilding import is_file, owner_in, rebuilt
from trl_variants.recipe import BoundKL, Recipe
from trl_variants.registry import Owner, Registry, load_registry
from trl_variants.rehearsal import rehearse
from trl_variants.slots import SLOTS
from trl_variants.variant import INHERIT, KL, Use, Variant

__all__ = ["bind", "flatten", "resolve"]

#: What a part of a blend consists of.
PART_SLOTS = ("advantage_estimator", "advantage_normalizer")
_DEEPEST = 8


def resolve(
    variant: str | Variant, overrides: Mapping[str, Any] | None = None, registry: Registry | None = None
) -> Recipe:
    """Bind every slot of a variant.

    Args:
        variant: Name of a registered variant, the ``variant.json`` of a run, or a `Variant`.
        overrides: By slot, as in a config: ``{slot: name}``, ``{slot: {name: ..., param: ...}}``, ``{slot: {param:
            ...}}``, a list for slots that take several, or null, ``none``, false or [] to switch a slot off.
        registry: Where names are looked up; `load_registry()` when left out.

    Returns:
        The recipe.

    Raises:
        VariantError: Something is unknown, misspelt, out of range or does not fit together.

    Example:
        >>> recipe = resolve("grpo", {"clip_rule": {"epsilon_high": 0.28}})
        >>> recipe.clip_rule.parameters["epsilon_low"], recipe.clip_rule.parameters["epsilon_high"]
        (0.2, 0.28)
    """
    registry = registry or load_registry()
    flat = apply_overrides(flatten(variant, registry), overrides or {})
    missing = [slot for slot in VARIANT_SLOTS if not SLOTS[slot].optional and getattr(flat, slot) is INHERIT]
    if missing:
        raise VariantError(
            f"variant '{flat.name}' has no {missing[0]}. Set it, or let the variant extend one that has it."
        )
    lists = {slot: _bind_list(slot, getattr(flat, slot), registry) for slot in VARIANT_SLOTS}
    recipe = Recipe(
        variant=flat,
        sample_filters=lists["sample_filter"],
        reward_shapers=lists["reward_shaper"],
        kl=_bind_kl(flat, registry),
        advantage_estimator=lists["advantage_estimator"][0],
        advantage_normalizers=lists["advantage_normalizer"],
        importance_ratio=lists["importance_ratio"][0],
        clip_rule=lists["clip_rule"][0],
        token_weights=lists["token_weight"],
        regularizers=lists["regularizer"],
        loss_aggregator=lists["loss_aggregator"][0],
        owner=_owner(variant, registry),
    )
    _check_across(recipe)
    rehearse(recipe)
    return recipe


def _owner(variant: str | Variant, registry: Registry) -> Owner | None:
    """Who registered a variant; None for one that was given itself."""
    if is_file(variant):
        return owner_in(str(variant))
    return registry.owner("variant", variant) if isinstance(variant, str) else None


def flatten(variant: str | Variant, registry: Registry) -> Variant:
    """Follow ``extends`` to the end, and fill in what no variant said."""
    if is_file(variant):
        flat = rebuilt(str(variant), registry)
    else:
        flat = registry.variant(variant) if isinstance(variant, str) else variant
    if not isinstance(flat, Variant):
        raise VariantError(f"variant must be a name or a Variant, not {type(variant).__name__}.")
    seen = [flat.name]
    while flat.extends:
        parent = registry.variant(flat.extends)
        if parent.name in seen:
            raise VariantError(f"variant '{flat.name}' extends itself: {' -> '.join([*seen, parent.name])}.")
        seen.append(parent.name)
        flat = flat.over(parent)
    defaults: dict[str, Any] = {slot: () for slot in VARIANT_SLOTS if SLOTS[slot].many}
    defaults |= {
        "token_weight": "rollout_correction",
        "kl": None,
        "critic": None,
        "reshuffle": False,
        "sampling": "mask",
    }
    defaults |= {"num_generations": None, "num_iterations": 1, "max_updates_per_rollout": None}
    return replace(flat, **{name: value for name, value in defaults.items() if getattr(flat, name) is INHERIT})


# -- binding ---------------------------------------------------------------------------------


def _bind_list(slot: str, value: Any, registry: Registry) -> tuple[Bound, ...]:
    items = as_list(value)
    if slot == "importance_ratio":
        items = items or ["none"]
    elif len(items) == 1 and is_off(items[0]):
        items = []
    if not items and not SLOTS[slot].optional:
        raise VariantError(f"{slot} cannot be switched off. Registered: {listing(sorted(registry.components(slot)))}.")
    if len(items) > 1 and not SLOTS[slot].many:
        raise VariantError(f"{slot} takes one component, not a list.")
    return _each_once(tuple(bind(slot, item, registry) for item in items))


def _each_once(bound: tuple[Bound, ...]) -> tuple[Bound, ...]:
    names = [b.name for b in bound]
    twice = [b for b in bound if names.count(b.name) > 1]
    if twice:
        raise VariantError(f"{twice[0].slot} lists '{twice[0].name}' more than once.")
    return bound


def bind(slot: str, value: Any, registry: Registry, place: str = "") -> Bound:
    """Find a component and bind its parameters, and those of its parts.

    Args:
        slot: The slot.
        value: A name, a component or ``use(...)``.
        registry: Where names are looked up.
        place: Where it stands inside another component.

    Raises:
        VariantError: It does not exist, or its parameters do not fit.
    """
    if not (isinstance(value, (str, Use)) or callable(value)):
        raise VariantError(f"{slot} must be a name, a component or use(...), not {value!r}.")
    use = as_use(value)
    if isinstance(use.component, str):
        registered = registry.component(slot, use.component)
        info, owner = registered.info, registered.owner
    else:
        info = info_of(use.component)
        check_inputs(SLOTS[slot], info)
        known = registry.components(slot).get(info.name)
        module = str(getattr(use.component, "__module__", "?"))
        owner = known.owner if known and known.info.function is info.function else Owner(module, module, "")
    parameters = info.bind(slot, use.parameters, SLOTS[slot].parameters)
    if "part_advantages" not in info.inputs:
        return Bound(slot, info, parameters, owner, (), place)
    if place.count("part ") >= _DEEPEST:
        raise VariantError(f"{slot} '{info.name}' holds parts of parts more than {_DEEPEST} deep.")
    parts = []
    for number, part in enumerate(parameters["parts"], 1):
        where = f"{slot} '{info.name}', part {number}"
        try:
            parts.append(_bind_part(part, registry, f"{place}part {number}."))
        except VariantError as error:
            raise VariantError(f"{where}: {error}") from error
    # As a config writes them, whatever they were given as.
    parameters["parts"] = [_written_part(part) for part in parts]
    return Bound(slot, info, parameters, owner, tuple(parts), place)


def _bind_part(part: Any, registry: Registry, place: str) -> tuple[Bound, ...]:
    """An estimator inside an estimator, with its normalizers."""
    if not isinstance(part, Mapping):
        raise VariantError(f"it must be a mapping with the keys {listing(PART_SLOTS)}, not {part!r}.")
    for key in part:
        if key not in PART_SLOTS:
            raise VariantError(f"it has no key '{key}'.{did_you_mean(key, PART_SLOTS)}")
    if is_off(part.get("advantage_estimator")):
        raise VariantError("it has no advantage_estimator.")
    chosen = [(slot, use) for slot in PART_SLOTS for use in as_list(override_slot(slot, part.get(slot), ()))]
    estimator, *normalizers = (bind(slot, use, registry, place) for slot, use in chosen)
    return (estimator, *_each_once(tuple(normalizers)))


def _written_part(part: tuple[Bound, ...]) -> dict[str, Any]:
    """A part as a config writes it: of each component the name, and the parameters that differ from the defaults."""

    def written(bound: Bound) -> Any:
        changed = {
            name: value
            for name, value in bound.parameters.items()
            if value != bound.info.parameters[name].default  # estimators and normalizers have none of their slot's
        }
        return {"name": bound.name, **changed} if changed else bound.name

    estimator, *normalizers = map(written, part)
    several = normalizers if len(normalizers) > 1 else normalizers[0] if normalizers else None
    return {"advantage_estimator": estimator, **({"advantage_normalizer": several} if several else {})}


def _bind_kl(variant: Variant, registry: Registry) -> BoundKL | None:
    kl = variant.kl
    if is_off(kl):
        return None
    if not isinstance(kl, KL):
        raise VariantError(f"kl of variant '{variant.name}' must be KL(...) or none, not {kl!r}.")
    try:
        coef = float(kl.coef)
    except (TypeError, ValueError) as error:
        raise VariantError(f"kl: coef must be a number, not {kl.coef!r}.") from error
    if not 0 <= coef < float("inf") or isinstance(kl.coef, bool):
        raise VariantError(f"kl: coef must be a number of at least 0, not {kl.coef!r}.")
    placement = as_use(kl.placement)
    if kl.weighted is not False:
        placement = Use(placement.component, {**placement.parameters, "weighted": kl.weighted})
    bound = BoundKL(
        estimator=bind("kl_estimator", kl.estimator, registry),
        placement=bind("kl_placement", placement, registry),
        controller=bind("kl_controller", kl.controller, registry),
        coef=coef,
    )
    return bound if coef else None


# -- checks across slots ---------------------------------------------------------------------


def _check_critic(recipe: Recipe) -> None:
    """Whoever reads values needs a critic, and a critic an estimator that reads its values."""
    variant = recipe.variant
    if variant.critic is None:
        for bound in recipe.components:
            for name in ("values", "old_values", "returns"):
                if bound.info.needs(name):
                    raise VariantError(
                        f"{bound.slot} '{bound.name}' needs {name}, and variant '{variant.name}' has no critic."
                    )
        return
    if not any(bound.info.needs("values") for bound in recipe.advantage_estimator.with_parts):
        raise VariantError(
            f"variant '{variant.name}' has a critic, and advantage_estimator '{recipe.advantage_estimator.name}' does "
            "not read its values. Use advantage_estimator: gae, or critic: none and no value_loss."
        )


def _check_across(recipe: Recipe) -> None:
    variant = recipe.variant
    if variant.critic not in (None, "separate", "shared"):
        raise VariantError(f"critic must be 'separate', 'shared' or none, not {variant.critic!r}.")
    if not isinstance(variant.reshuffle, bool):
        raise VariantError(f"reshuffle must be true or false, not {variant.reshuffle!r}.")
    if variant.sampling not in ("mask", "resample"):
        raise VariantError(f"sampling must be 'mask' or 'resample', not {variant.sampling!r}.")
    if variant.sampling == "resample" and not recipe.sample_filters:
        raise VariantError(
            f"sampling 'resample' draws again for what a sample_filter drops, and variant '{variant.name}' has none, "
            "so it would never draw again. Use sample_filter: zero_variance, or sampling: mask."
        )
    _check_critic(recipe)
    kl = recipe.kl
    weighted = bool(kl and kl.placement.parameters.get("weighted"))
    if kl and kl.estimator.name == "k1" and not kl.in_reward and not weighted:
        raise VariantError(
            "kl_estimator 'k1' in the loss has an expected gradient of zero, so it would not hold the policy to the "
            "reference. Use kl: {weighted: true}, kl: {estimator: k2}, or a placement in the reward."
        )
    reads_ratio = "log_ratio" in recipe.clip_rule.info.inputs
    if recipe.importance_ratio.info.level == "one":
        if reads_ratio:
            raise VariantError(
                f"clip_rule '{recipe.clip_rule.name}' clips a ratio, and importance_ratio "
                f"'{recipe.importance_ratio.name}' fixes it at 1. Use clip_rule: policy_gradient, or "
                "importance_ratio: token."
            )
    elif not reads_ratio and not weighted:
        raise VariantError(
            f"importance_ratio '{recipe.importance_ratio.name}' has no effect: clip_rule '{recipe.clip_rule.name}' "
            "reads no ratio. Use importance_ratio: none, or another clip_rule."
        )
