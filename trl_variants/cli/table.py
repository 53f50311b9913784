"""``trl-variants table``: every variant in the six parts of an objective."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import RenderableType
from rich.text import Text

from trl_variants.cli.output import Form, columns, emit, fits, markdown_table, print_json, print_raw, styled
from trl_variants.describe import PARTS, table_row
from trl_variants.errors import VariantError
from trl_variants.registry import Registry
from trl_variants.resolution import resolve

__all__ = ["run"]

_MEASURE = "grpo"


def run(registry: Registry, form: Form) -> None:
    """Print the table; a variant that cannot be resolved is a line on stderr."""
    rows: dict[str, dict[str, str]] = {}
    for name in registry.variants:
        try:
            rows[name] = table_row(resolve(name, registry=registry))
        except VariantError as error:
            typer.echo(f"Warning: variant '{name}' is left out: {error}", err=True)
    measure = rows[_MEASURE]
    if form == "json":
        print_json([_entry(registry, name, row, measure) for name, row in rows.items()])
        return
    common = _common(rows)
    cells = {name: _cells(row, measure, common) for name, row in rows.items()}
    notes = [f"Emphasised: what differs from {_MEASURE}."]
    notes += [f"In every variant: {', '.join(common)}."] if common else []
    if form == "markdown":
        papers = {name: registry.variants[name].paper for name in rows}
        print_raw(_markdown(cells, papers) + "\n\n" + " ".join(notes))
        return
    header = ("variant", *map(_heading, PARTS))
    table = [(Text(name, style="cyan"), *(_text(row[part]) for part in PARTS)) for name, row in cells.items()]
    if fits(table, header):
        emit(columns(table, header=header), "", Text(" ".join(notes), style="dim"))
        return
    notes[0] = f"Shown: what differs from {_MEASURE}. A wider terminal, --markdown and --json show every part."
    emit(_differences(cells), "", Text(" ".join(notes), style="dim"))


def _entry(registry: Registry, name: str, row: dict[str, str], measure: dict[str, str]) -> dict[str, Any]:
    return {
        "variant": name,
        **{part: row[part].split("; ") if part == "besides" else row[part] for part in PARTS},
        "differs": [part for part in PARTS if row[part] != measure[part]],
        "paper": registry.variants[name].paper,
    }


def _common(rows: dict[str, dict[str, str]]) -> list[str]:
    """What stands beside the six parts in every variant; it is said once."""
    beside = [row["besides"].split("; ") for row in rows.values()]
    return [item for item in beside[0] if all(item in items for items in beside)]


#: A cell: its pieces, and whether each differs from the measure.
Cell = list[tuple[str, bool]]


def _cells(row: dict[str, str], measure: dict[str, str], common: list[str]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {part: [(row[part], row[part] != measure[part])] for part in PARTS if part != "besides"}
    usual = measure["besides"].split("; ")
    cells["besides"] = [(item, item not in usual) for item in row["besides"].split("; ") if item not in common]
    return cells


def _markdown(cells: dict[str, dict[str, Cell]], papers: dict[str, str | None]) -> str:
    rows = [
        (
            f"[{name}]({papers[name]})" if papers[name] else name,
            *(", ".join(f"**{text}**" if differs else text for text, differs in row[part]) for part in PARTS),
        )
        for name, row in cells.items()
    ]
    return markdown_table(("variant", *map(_heading, PARTS)), rows)


# -- as text -----------------------------------------------------------------------------------


def _text(cell: Cell) -> Text:
    """Bold where a terminal can show it, between asterisks where not."""
    bold = styled()
    return Text(", ").join(
        Text(text if bold or not differs else f"*{text}*", style="bold" if differs else "dim") for text, differs in cell
    )


def _differences(rows: dict[str, dict[str, Cell]]) -> RenderableType:
    """For a narrow terminal: the measure whole, and of each other variant the parts that differ from it."""
    lines: list[tuple[str | Text, ...]] = []
    for name, row in rows.items():
        shown = [part for part in PARTS if name == _MEASURE or any(differs for _, differs in row[part])]
        for part in shown or PARTS[:1]:
            value = Text(", ").join(Text(text, style="bold" if differs else "dim") for text, differs in row[part])
            lines.append(
                ("" if lines and part != (shown or PARTS)[0] else Text(name, style="cyan"), _heading(part), value)
            )
    return columns(lines)


def _heading(part: str) -> str:
    return "KL" if part == "kl" else part
