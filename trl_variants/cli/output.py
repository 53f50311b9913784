"""What the verbs share: reading options, loading plugins, and writing text, JSON and Markdown."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from trl_variants.errors import VariantError
from trl_variants.registry import Registry, load_registry

__all__ = [
    "Form",
    "chosen",
    "code",
    "columns",
    "emit",
    "fits",
    "load",
    "mapping",
    "markdown_table",
    "paper_link",
    "paper_name",
    "print_json",
    "print_raw",
    "width",
]

Form = Literal["text", "json", "markdown"]


# -- options -----------------------------------------------------------------------------------


def chosen(as_json: bool, as_markdown: bool) -> Form:
    """The form of the output that the options ask for."""
    if as_json and as_markdown:
        raise VariantError("--json and --markdown are two forms of the same; choose one.")
    return "json" if as_json else "markdown" if as_markdown else "text"


def load(plugins: Sequence[str] | None) -> Registry:
    """The registry with the plugins named besides; an installed one that is broken is a line on stderr."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The plugin '", category=UserWarning)
        registry = load_registry(extra=plugins or ())
    for broken in registry.broken:
        typer.echo(f"Warning: the plugin of {broken.owner} could not be loaded: {broken.error!r}", err=True)
    return registry


def mapping(text: str | None) -> Mapping[str, Any]:
    """Overrides as written on the command line."""
    import yaml

    if text is None:
        return {}
    try:
        value = yaml.safe_load(text)  # JSON is YAML
    except yaml.YAMLError as error:
        raise VariantError(f"--overrides can be read neither as JSON nor as YAML: {text!r}.") from error
    if not isinstance(value, Mapping):
        raise VariantError(
            "--overrides must be a mapping by slot, such as '{clip_rule: {epsilon_high: 0.28}}' "
            f"(a space follows each colon); not {text!r}."
        )
    return value


# -- text --------------------------------------------------------------------------------------


def width() -> int:
    """Columns of the terminal; 80 where nothing says how many."""
    return _console().width


def fits(table: Table) -> bool:
    """Whether a table can be printed without folding a word."""
    console = _console()
    return Measurement.get(console, console.options.update(max_width=10_000), table).minimum <= console.width


def emit(*parts: RenderableType) -> None:
    """Print to stdout, with colour and bold on a terminal only, and no blanks at the ends of lines."""
    console = _console()
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    print_raw("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


def columns(rows: Iterable[Sequence[str | Text]], *, header: Sequence[str] = (), indent: int = 2) -> Table:
    """Aligned columns. A cell that does not fit is folded, never cut."""
    rows = list(rows)
    table = Table(
        box=box.SIMPLE_HEAD if header else None,
        show_header=bool(header),
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
    )
    width = max([len(header), *(len(row) for row in rows)])
    for index in range(width + 1):
        if index == 0:
            table.add_column("", width=max(indent - 2, 0), min_width=max(indent - 2, 0))
        else:
            table.add_column(header[index - 1] if header else "", overflow="fold")
    for row in rows:
        table.add_row("", *row)
    return table


def paper_name(address: str | None) -> str:
    """A paper's address as a reader knows it: ``arXiv:2402.03300``."""
    plain = (address or "").removeprefix("https://").removeprefix("http://")
    return plain.replace("arxiv.org/abs/", "arXiv:").replace("doi.org/", "doi:")


# -- JSON and Markdown: never wrapped, never cut -----------------------------------------------


def print_raw(text: str) -> None:
    """Write text as it is."""
    typer.echo(text)


def print_json(data: Any) -> None:
    """Write JSON; in ASCII where stdout cannot hold more."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    print_raw(json.dumps(data, indent=2, ensure_ascii=not encoding.startswith("utf")))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of GitHub's Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def paper_link(address: str | None) -> str:
    """A paper's name with its address behind it."""
    return f"[{paper_name(address)}]({address})" if address else ""


def code(text: str) -> str:
    """Text as code, nothing for nothing."""
    return f"`{text}`" if text else ""
