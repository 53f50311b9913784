"""``trl-variants table``: every variant in the six parts of an objective."""

from __future__ import annotations

from typing import Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from trl_variants.cli.output import Form, emit, fits, markdown_table, print_json, print_raw
from trl_variants.describe import PARTS, table_row
from trl_variants.errors import VariantError
from trl_variants.registry import Registry
from trl_variants.resolution import resolve

__all__ = ["run"]

_MEASURE = "grpo"
_HEADINGS = {"kl": "KL"}


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
    table = _table(cells)
    emit(table if fits(table) else _blocks(cells), "", Text(" ".join(notes), style="dim"))


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
    return markdown_table(("variant", *(_HEADINGS.get(part, part) for part in PARTS)), rows)


# -- as text -----------------------------------------------------------------------------------


def _text(cell: Cell) -> Text:
    """Bold where a terminal can show it, between asterisks where not."""
    return Text(", ").join(Text(text, style="bold" if differs else "dim") for text, differs in cell)


def _table(cells: dict[str, dict[str, Cell]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("variant", *PARTS):
        table.add_column(_HEADINGS.get(heading, heading), overflow="fold")
    for name, row in cells.items():
        table.add_row(Text(name, style="cyan"), *(_text(row[part]) for part in PARTS))
    return table


def _blocks(cells: dict[str, dict[str, Cell]]) -> Table:
    """For a narrow terminal: each variant over a few lines, every part by its name."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, row in cells.items():
        parts = [Text.assemble((f"{_HEADINGS.get(part, part)}: ", ""), _text(row[part])) for part in PARTS if row[part]]
        table.add_row(Text(name, style="cyan"), Text(" · ").join(parts))
    return table
