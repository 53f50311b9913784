"""``trl-variants show``: one variant, whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from trl_variants.binding import Bound
from trl_variants.cli.output import (
    Form,
    code,
    columns,
    emit,
    markdown_table,
    paper_link,
    paper_name,
    print_json,
    print_raw,
)
from trl_variants.describe import (
    SETTINGS,
    defaults_of,
    formula,
    formula_text,
    models,
    needs,
    number,
    recipe_dict,
    slots_of,
)
from trl_variants.recipe import Recipe
from trl_variants.registry import Registry
from trl_variants.resolution import resolve
from trl_variants.variant import INHERIT

__all__ = ["run"]

#: What the built-in formulas write without saying.
_LEGEND = (
    (r"oᵢ", "oᵢ a completion, t its tokens"),
    (r"\bN\b", "N completions in the step"),
    (r"r_G|\bG\b", "G completions of one prompt"),
    (r"\bsg\[", "sg no gradient"),
)


def run(registry: Registry, name: str, overrides: Mapping[str, Any], form: Form) -> None:
    """Print a variant."""
    recipe = resolve(name, overrides, registry)
    sources = _sources(registry, name, overrides)
    data = {
        **recipe_dict(recipe),
        "extends": registry.variant(name).extends,
        "registered_by": str(registry.owner("variant", name)),
        "set_by": sources,
        "objective": {"latex": formula(recipe), "text": formula_text(recipe)},
        "models": [model._asdict() for model in models(recipe)],
        "needs": needs(recipe),
    }
    if form == "json":
        print_json(data)
    elif form == "markdown":
        print_raw(_markdown(recipe, data))
    else:
        _print(recipe, data)


def _sources(registry: Registry, name: str, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Which variant of the chain sets each slot and setting: the nearest that says something about it."""
    chain = [registry.variant(name)]
    while parent := chain[-1].extends:
        chain.append(registry.variant(parent))
    fields = [slot for slot in recipe_fields() if hasattr(chain[0], slot)]
    return {
        field: "override"
        if field in overrides
        else next((variant.name for variant in chain if getattr(variant, field) is not INHERIT), "default")
        for field in fields
    }


def recipe_fields() -> list[str]:
    """The slots of a variant, KL as one, and its settings."""
    from trl_variants.resolution import VARIANT_SLOTS

    return [*VARIANT_SLOTS, "kl", *SETTINGS]


def _rows(recipe: Recipe, data: dict[str, Any]) -> list[tuple[str, Bound | None, str]]:
    """Every slot as it is filled: its name, a component or none, and which variant said so."""
    rows: list[tuple[str, Bound | None, str]] = []
    for slot, filled in slots_of(recipe).items():
        in_kl = slot.startswith("kl_")
        if in_kl and recipe.kl is None:
            if slot == "kl_estimator":
                rows.append(("kl", None, data["set_by"]["kl"]))
            continue
        rows += [(slot, bound, data["set_by"]["kl" if in_kl else slot]) for bound in filled or (None,)]
    return rows


def _settings(data: dict[str, Any]) -> str:
    return ", ".join(f"{name}={number(value)}" for name, value in data["settings"].items() if value is not None)


def _distributions(recipe: Recipe) -> list[str]:
    return list(dict.fromkeys(str(bound.owner) for bound in recipe.components))


# -- as text -----------------------------------------------------------------------------------


def _print(recipe: Recipe, data: dict[str, Any]) -> None:
    about = [f"extends {data['extends']}" if data["extends"] else "", paper_name(data["paper"])]
    title = Text.assemble((data["variant"], "bold"), "  ", (" · ".join(filter(None, about)), "dim"))
    emit(title, *filter(None, [data["summary"]]), "")
    emit(Text("Objective", style="bold"), _objective(data["objective"]["text"]), "")
    emit(Text("Slots", style="bold"), _slots(recipe, data), "")
    emit(Text("Models", style="bold"), _models(recipe), "")
    emit(Text("Needs", style="bold"), columns([("-", sentence) for sentence in data["needs"]]))


def _objective(lines: list[str]) -> Table:
    """The lines, aligned at their signs; a legend for what they leave unsaid."""
    rows: list[tuple[str | Text, ...]] = []
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=1)
    for _ in range(3):
        table.add_column(overflow="fold")
    for line in lines:
        match = re.fullmatch(r"(\S+) ([=←]) (.*)", line)
        rows.append(match.groups() if match else ("", "", line))
    legend = "; ".join(meaning for sign, meaning in _LEGEND if re.search(sign, " ".join(lines)))
    for row in [*rows, ("", "", Text(legend, style="dim"))]:
        table.add_row("", *row)
    return table


def _slots(recipe: Recipe, data: dict[str, Any]) -> Table:
    rows: list[tuple[str | Text, ...]] = []
    several, last = len(_distributions(recipe)) > 1, ""
    for slot, bound, source in _rows(recipe, data):
        where = "" if source == data["variant"] and not data["extends"] else _source_text(source, data)
        shown = "" if slot == last else slot
        last = slot
        if bound is None:
            rows.append((shown, Text("none", style="dim"), where, ""))
            continue
        origin = paper_name(bound.info.paper) + (f" {bound.owner}" if several else "")
        rows.append((shown, _component(bound), where, Text(origin.strip(), style="dim")))
    if recipe.kl:
        at = next(i for i, row in enumerate(rows) if row[0] == "kl_controller")
        rows.insert(at + 1, ("kl coef", Text(number(recipe.kl.coef), style="bold"), "", ""))
    rows.append(("settings", _settings(data), "", ""))
    return columns([(Text(str(row[0]), style="cyan"), *row[1:]) for row in rows])


def _source_text(source: str, data: dict[str, Any]) -> Text:
    own = source in (data["variant"], "override")
    return Text(source, style="bold" if own else "dim")


def _component(bound: Bound) -> Text:
    """A component and its parameters; those that differ from their defaults stand out."""
    text, defaults = Text(bound.name), defaults_of(bound)
    for index, (name, value) in enumerate(bound.parameters.items()):
        text.append(", " if index else " ")
        text.append(f"{name}={number(value)}", style="bold" if value != defaults[name] else "dim")
    return text


def _models(recipe: Recipe) -> Table:
    rows = [(model.name, "trained" if model.trained else "frozen", model.reason) for model in models(recipe)]
    absent = [name for name in ("critic", "reference") if name not in {row[0] for row in rows}]
    note = "One more, frozen, where a reward is a model."
    if absent:
        note += f" Not needed: {', '.join(absent)}."
    return columns([*rows, ("", "", Text(note, style="dim"))])


# -- as Markdown -------------------------------------------------------------------------------


def _markdown(recipe: Recipe, data: dict[str, Any]) -> str:
    slots = [
        (code(slot), code(bound.name), code(_parameters(bound)), source, paper_link(bound.info.paper), str(bound.owner))
        if bound
        else (code(slot), "none", "", source, "", "")
        for slot, bound, source in _rows(recipe, data)
    ]
    if recipe.kl:
        slots.append(("`kl` coef", "", code(number(recipe.kl.coef)), data["set_by"]["kl"], "", ""))
    resident = [(model.name, "trained" if model.trained else "frozen", model.reason) for model in models(recipe)]
    about = [f"Extends `{data['extends']}`." if data["extends"] else "", paper_link(data["paper"])]
    lines = " \\\\\n".join(f"& {line}" for line in data["objective"]["latex"])
    parts = [
        f"# {data['variant']}",
        data["summary"],
        " ".join(filter(None, about)),
        "```math\n\\begin{aligned}\n" + lines + "\n\\end{aligned}\n```",
        markdown_table(("slot", "component", "parameters", "set by", "paper", "distribution"), slots),
        f"Settings: {code(_settings(data))}.",
        markdown_table(("model", "", "why"), resident),
        "\n".join(f"- {sentence}" for sentence in data["needs"]),
    ]
    return "\n\n".join(filter(None, parts))


def _parameters(bound: Bound) -> str:
    return ", ".join(f"{name}={number(value)}" for name, value in bound.parameters.items())
