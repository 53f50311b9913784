"""``trl-variants show``: one variant, whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
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
from trl_variants.overrides import OVERRIDES
from trl_variants.recipe import Recipe
from trl_variants.registry import Registry
from trl_variants.resolution import resolve
from trl_variants.variant import INHERIT

__all__ = ["run"]

_INDENT = (0, 0, 0, 2)
#: The keys of a KL override that change each of its slots.
_KL_KEYS = {
    "kl_estimator": ("estimator",),
    "kl_placement": ("placement", "weighted"),
    "kl_controller": ("controller", "coef"),
}

#: What the built-in formulas write without saying.
_LEGEND = (
    (r"oᵢ", "oᵢ a completion, t its tokens"),
    (r"\bN\b", "N completions in the step"),
    (r"r_G|\bG\b", "G of one prompt"),
    (r"\bsg\[", "sg[·] without gradient"),
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
    said = {
        field: next((variant.name for variant in chain if getattr(variant, field) is not INHERIT), "default")
        for field in dict.fromkeys((*OVERRIDES, *SETTINGS))
    }
    for slot, keys in _KL_KEYS.items():
        changed = overrides.get("kl", {})
        partly = isinstance(changed, Mapping) and not any(key in changed for key in keys)
        said[slot] = said["kl"] if partly else "override"
    return {**said, **dict.fromkeys(overrides, "override")}


def _rows(recipe: Recipe, data: dict[str, Any]) -> list[tuple[str, Bound | None, str]]:
    """Every slot as it is filled: its name, a component or none, and which variant said so."""
    rows: list[tuple[str, Bound | None, str]] = []
    for slot, filled in slots_of(recipe).items():
        if slot.startswith("kl_") and recipe.kl is None:
            if slot == "kl_estimator":
                rows.append(("kl", None, data["set_by"]["kl"]))
            continue
        rows += [(slot, bound, data["set_by"][slot]) for bound in filled or (None,)]
    return rows


def _settings(data: dict[str, Any]) -> str:
    """The settings that a variant or an override says something about."""
    said = {name: value for name, value in data["settings"].items() if data["set_by"][name] != "default"}
    return ", ".join(f"{name}={number(value)}" for name, value in said.items())


# -- as text -----------------------------------------------------------------------------------


def _print(recipe: Recipe, data: dict[str, Any]) -> None:
    about = (f"extends {data['extends']}" if data["extends"] else "", paper_name(data["paper"]), data["registered_by"])
    emit(Text.assemble((data["variant"], "bold"), "  ", (" · ".join(filter(None, about)), "dim")))
    emit(*filter(None, [data["summary"]]), "")
    emit(Text("Objective", style="bold"), *_objective(data["objective"]["text"]), "")
    emit(Text("Slots", style="bold"), *_slots(recipe, data), "")
    emit(Text("Models", style="bold"), *_models(recipe), "")
    emit(Text("Needs", style="bold"), columns([("-", sentence) for sentence in data["needs"]]))


def _objective(lines: list[str]) -> Iterator[RenderableType]:
    """The lines, aligned at their signs; a legend for what they leave unsaid."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    whole = []
    for line in lines:
        match = re.fullmatch(r"(\S+) ([=←]) (.*)", line)
        if match:
            table.add_row(*match.groups())
        else:
            whole.append(line)
    yield Padding(table, _INDENT)
    yield from (Padding(line, _INDENT) for line in whole)
    legend = "; ".join(meaning for sign, meaning in _LEGEND if re.search(sign, " ".join(lines)))
    yield Padding(Text(legend, style="dim"), _INDENT)


def _slots(recipe: Recipe, data: dict[str, Any]) -> Iterator[RenderableType]:
    """The slots that are filled, or that a variant switched off; the others in one line."""
    own = {data["variant"], "override"} if data["extends"] or "override" in data["set_by"].values() else {"override"}
    rows: list[tuple[str | Text, ...]] = []
    empty, above = [], ""
    for slot, bound, source in _rows(recipe, data):
        if bound is None and source == "default":
            empty.append(slot)
            continue
        where = "" if source == data["variant"] else source if source in ("default", "override") else f"as {source}"
        component = _component(bound, recipe, source in own) if bound else Text("none")
        papers = [_broken(paper_name(bound.info.paper))] if bound else []
        if bound and str(bound.owner) != data["registered_by"]:
            papers.append(str(bound.owner))
        heading = Text("" if slot == above else slot, style="cyan")
        rows.append((heading, component, Text(where, style="dim"), Text("\n".join(papers).strip(), style="dim")))
        above = slot
    if settings := _settings(data):
        rows.append((Text("settings", style="cyan"), Text(settings), "", ""))
    yield columns(rows)
    if empty:
        yield Padding(Text(f"Empty: {', '.join(empty)}.", style="dim"), _INDENT)


def _component(bound: Bound, recipe: Recipe, own: bool) -> Text:
    """A component and its parameters; those that differ from their defaults stand out."""
    defaults = defaults_of(bound)
    said = [(f"{name}={number(v)}", "bold" if v != defaults[name] else "dim") for name, v in bound.parameters.items()]
    if bound.slot == "kl_controller" and recipe.kl:
        said.insert(0, (f"coef={number(recipe.kl.coef)}", "bold"))
    separated = [piece for pair in said for piece in (", ", pair)][1:]
    return Text.assemble((bound.name, "bold" if own else ""), " " if said else "", *separated)


def _broken(paper: str) -> str:
    """A long address over two lines, at its last slash."""
    head, slash, tail = paper.rpartition("/")
    return f"{head}{slash}\n{tail}" if len(paper) > 18 and slash else paper


def _models(recipe: Recipe) -> Iterator[RenderableType]:
    rows = [(model.name, "trained" if model.trained else "frozen", model.reason) for model in models(recipe)]
    absent = [f"no {name}" for name in ("critic", "reference") if name not in {row[0] for row in rows}]
    note = "A reward model, where one scores, is one more, frozen."
    note += f" There is {' and '.join(absent)}." if absent else ""
    yield columns(rows)
    yield Padding(Text(note, style="dim"), _INDENT)


# -- as Markdown -------------------------------------------------------------------------------


def _markdown(recipe: Recipe, data: dict[str, Any]) -> str:
    slots = [
        (
            code(slot),
            code(bound.name),
            code(_parameters(bound, recipe)),
            source,
            paper_link(bound.info.paper),
            str(bound.owner),
        )
        if bound
        else (code(slot), "none", "", source, "", "")
        for slot, bound, source in _rows(recipe, data)
    ]
    resident = [(model.name, "trained" if model.trained else "frozen", model.reason) for model in models(recipe)]
    about = [f"Extends `{data['extends']}`." if data["extends"] else "", paper_link(data["paper"])]
    lines = " \\\\\n".join(f"& {line}" for line in data["objective"]["latex"])
    parts = [
        f"# {data['variant']}",
        data["summary"],
        " ".join(filter(None, about)),
        "```math\n\\begin{aligned}\n" + lines + "\n\\end{aligned}\n```",
        markdown_table(("slot", "component", "parameters", "set by", "paper", "distribution"), slots),
        f"Settings: {code(_settings(data))}." if _settings(data) else "",
        markdown_table(("model", "", "why"), resident),
        "\n".join(f"- {sentence}" for sentence in data["needs"]),
    ]
    return "\n\n".join(filter(None, parts))


def _parameters(bound: Bound, recipe: Recipe) -> str:
    said = [f"{name}={number(value)}" for name, value in bound.parameters.items()]
    if bound.slot == "kl_controller" and recipe.kl:
        said.insert(0, f"coef={number(recipe.kl.coef)}")
    return ", ".join(said)
