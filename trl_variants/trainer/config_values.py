"""Values of a config on their way in and out: mappings from the command line, and plain data for logs."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from trl_variants.errors import VariantError
from trl_variants.variant import KL, Use, Variant

__all__ = ["parse_mapping", "plain"]


def parse_mapping(text: str) -> dict[str, Any]:
    """A mapping from the command line, in JSON or YAML."""
    import yaml

    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise VariantError(f"variant_overrides is neither JSON nor YAML: {error}") from error
    if not isinstance(value, dict):
        raise VariantError(f"variant_overrides must be a mapping by slot, not {text!r}.")
    return value


def plain(value: Any) -> Any:
    """A value without functions: components by module and name, in the form that a config has."""
    if isinstance(value, Variant):
        return value.name
    if isinstance(value, Use):
        return {"name": plain(value.component), **plain(dict(value.parameters))}
    if isinstance(value, KL):
        return {key.name: plain(getattr(value, key.name)) for key in fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else str(value)
