"""What the verbs share: reading options, loading plugins, and writing text, JSON and Markdown."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Annotated, Any, Literal

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trl_variants.errors import VariantError
from trl_variants.registry import Registry, load_registry

__all__ = [
    "Form",
    "Plugins",
    "Row",
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
    "styled",
]

Form = Literal["text", "json", "markdown"]
Row = Sequence[str | Text]

#: Blanks between columns.
_GAP = 2


# -- options -----------------------------------------------------------------------------------

Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugins", metavar="MODULE", help="Load a module or a .py file that is not installed as a plugin. Repeatable."
    ),
]


def chosen(as_json: bool, as_markdown: bool) -> Form:
    """The form of the output that the options ask for."""
    if as_json and as_markdown:
        raise VariantError("--json and --markdown are two forms of the same; choose one.")
    return "json" if as_json else "markdown" if as_markdown else "text"


def load(plugins: Sequence[str] | None) -> Registry:
    """The registry with the plugins named besides; an installed one that is broken is a line on stderr."""
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):  # what plugins print is no part of what is asked for
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


def emit(*parts: RenderableType) -> None:
    """Print to stdout, with colour and bold on a terminal only, and no blanks at the ends of lines."""
    console = _console()
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    print_raw("\n".join(line.rstrip() for line in captured.get()[:-1].split("\n")))


def styled() -> bool:
    """Whether bold can be seen where stdout goes."""
    return _console().color_system is not None


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


def columns(rows: Sequence[Row], *, header: Sequence[str] = ()) -> RenderableType:
    """Aligned columns, indented unless they have a header. A cell that does not fit is folded, never cut."""
    indent = 0 if header else 2
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    widths = _widths(rows, header, _console().width - indent)
    for width in widths:
        table.add_column(width=width, overflow="fold")
    if header:
        table.add_row(*(Text(heading, style="bold") for heading in header))
        table.add_row(*("─" * width for width in widths))
    for row in rows:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, indent))


def fits(rows: Sequence[Row], header: Sequence[str]) -> bool:
    """Whether the columns can be printed without folding a word."""
    words = [_longest(column, str.split) for column in zip(*rows, header, strict=True)]
    return sum(words) + _GAP * (len(words) - 1) <= _console().width


def _widths(rows: Sequence[Row], header: Sequence[str], total: int) -> list[int]:
    """Widths that add up to no more than there is. Words are folded from the last column on, and only if they must."""
    table = list(zip(*rows, *([header] if header else []), strict=True))
    natural = [_longest(column, str.splitlines) for column in table]
    widths = [_longest(column, str.split) for column in table]
    room = total - _GAP * (len(table) - 1)
    for index in reversed(range(len(widths))):
        excess = max(sum(widths) - room, 0)
        widths[index] -= min(excess, max(widths[index] - 4, 0))
    while (left := room - sum(widths)) > 0 and (short := [i for i, w in enumerate(widths) if w < natural[i]]):
        for index in short[:left]:
            widths[index] += 1
    return widths


def _longest(column: Iterable[str | Text], cut: Callable[[str], list[str]]) -> int:
    return max(cell_len(piece) for cell in column for piece in [*cut(str(cell)), " "])


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
