"""What a config may change of a variant: slots by name, by parameter or by list, and how each is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from trl_variants.errors import VariantError, did_you_mean, listing
from trl_variants.slots import SLOTS
from trl_variants.variant import INHERIT, KL, Use, Variant

__all__ = ["OVERRIDES", "VARIANT_SLOTS", "apply_overrides", "as_list", "as_use", "is_off", "override_slot"]

#: Slots that a variant and its overrides name directly; the three KL slots are named inside ``kl``.
VARIANT_SLOTS = tuple(name for name in SLOTS if not name.startswith("kl_"))
SETTINGS = ("critic", "reshuffle", "sampling")
OVERRIDES = (*VARIANT_SLOTS, "kl", *SETTINGS)
KL_KEYS = tuple(f.name for f in fields(KL))


def is_off(value: Any) -> bool:
    """Whether a value switches a slot off: None, False, an empty list, or ``none``."""
    if isinstance(value, str):
        return value.lower() in ("none", "null", "off")
    return value is None or value is False or (isinstance(value, (list, tuple)) and not value)


def apply_overrides(variant: Variant, overrides: Mapping[str, Any]) -> Variant:
    """Return the variant with a config's overrides applied."""
    if not isinstance(overrides, Mapping):
        raise VariantError(f"variant_overrides must be a mapping by slot, not {type(overrides).__name__}.")
    changes: dict[str, Any] = {}
    for key, value in overrides.items():
        if key not in OVERRIDES:
            inside = f" Write kl: {{{key.removeprefix('kl_')}: ...}}." if key.startswith("kl_") else ""
            raise VariantError(
                f"variant_overrides has no key '{key}'.{inside or did_you_mean(key, OVERRIDES)} "
                f"Keys: {listing(OVERRIDES)}."
            )
        if key == "kl":
            changes[key] = _override_kl(variant, value)
        elif key == "reshuffle":
            changes[key] = False if is_off(value) else value
        elif key in SETTINGS:
            changes[key] = None if is_off(value) else value
        else:
            changes[key] = override_slot(key, value, as_list(getattr(variant, key)))
    return replace(variant, **changes)


def override_slot(slot: str, value: Any, current: Sequence[Any]) -> Any:
    """What a slot holds after an override: nothing, one component or several.

    Args:
        slot: The slot.
        value: As a config writes it.
        current: What the slot holds before.
    """
    if is_off(value):
        return ()
    if isinstance(value, (list, tuple)):
        if not SLOTS[slot].many:
            raise VariantError(f"{slot} takes one component, not a list.")
        return tuple(_override_one(slot, item, current) for item in value)
    return _override_one(slot, value, current)


def _override_one(slot: str, value: Any, current: Sequence[Any]) -> Any:
    """One component as a config writes it: a name, or a mapping with or without a name."""
    if isinstance(value, Use):
        return value
    uses = [as_use(item) for item in current]
    if isinstance(value, str) or callable(value):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise VariantError(f"{slot} must be a name or a mapping, not {value!r}.")
    name = value.get("name")
    if name is None:
        if not uses:
            raise VariantError(f"{slot} is empty here, so the override must name a component: {{name: ...}}.")
        if len(uses) != 1:
            raise VariantError(
                f"{slot} holds {len(uses)} components here, so the override must say which: {{name: ...}}."
            )
        name = uses[0].component
    # The variant's own component keeps the variant's parameters; another one starts from its defaults.
    same = [use for use in uses if use.component == name]
    kept = same[0].parameters if same else {}
    return Use(name, {**kept, **{key: item for key, item in value.items() if key != "name"}})


def _override_kl(variant: Variant, value: Any) -> KL | None:
    if is_off(value):
        return None
    if isinstance(value, KL):
        return value
    if not isinstance(value, Mapping):
        raise VariantError(f"kl must be a mapping with the keys {listing(KL_KEYS)}, or none; not {value!r}.")
    for key in value:
        if key not in KL_KEYS:
            raise VariantError(f"kl has no key '{key}'.{did_you_mean(key, KL_KEYS)} Keys: {listing(KL_KEYS)}.")
    base = {} if is_off(variant.kl) else {key: getattr(variant.kl, key) for key in KL_KEYS}
    absent = [key for key in ("estimator", "placement", "coef") if key not in {**base, **value}]
    if absent:
        raise VariantError(
            f"variant '{variant.name}' has no KL of its own, so kl must also set {listing(absent)}; for example kl: "
            "{estimator: k3, placement: loss, coef: 0.04}."
        )
    parts = {
        key: _override_one(f"kl_{key}", item, [base[key]] if key in base else [])
        if key in ("estimator", "placement", "controller")
        else item
        for key, item in value.items()
    }
    return KL(**{**base, **parts})


def as_list(value: Any) -> list[Any]:
    """The components that a slot of a variant holds."""
    if value is INHERIT or value is None or value is False:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def as_use(value: str | Callable[..., Any] | Use) -> Use:
    """A component with parameters, also where only the component is named."""
    return value if isinstance(value, Use) else Use(value)
