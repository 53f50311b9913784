"""``trl-variants``: the verbs and their options. What a verb does is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trl_variants import __version__
from trl_variants.cli import demo, train
from trl_variants.cli.output import Plugins
from trl_variants.errors import VariantError


class _OneCleanMessage(TyperGroup):
    """A mistake of the user's is one message on stderr and exit code 2; ``--traceback`` shows where it arose."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VariantError as error:
            if ctx.params.get("traceback"):
                raise
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="trl-variants",
    cls=_OneCleanMessage,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Variants of policy-gradient training (GRPO, RLOO, DAPO, ...) as plugins on TRL's trainer.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trl-variants {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error arose.")] = False,
) -> None:
    # A terminal or a pipe that cannot write β shows a question mark rather than failing.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@app.command("list")
def list_(
    slot: Annotated[
        str | None, typer.Option("--slot", help="Only this slot; `variant` and `reward_function` count as slots.")
    ] = None,
    plugins: Plugins = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Everything that is registered: variants, the components of each slot, reward functions."""
    from trl_variants.cli import catalogue
    from trl_variants.cli.output import chosen, load

    form = chosen(json, markdown)
    catalogue.run(load(plugins), slot, form)


@app.command()
def show(
    variant: Annotated[str, typer.Argument(metavar="VARIANT", help="Name of a variant.")],
    overrides: Annotated[
        str | None, typer.Option("--overrides", metavar="YAML", help="variant_overrides, as JSON or YAML.")
    ] = None,
    plugins: Plugins = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """One variant: its objective, its slots, the models that it needs."""
    from trl_variants.cli import show as verb
    from trl_variants.cli.output import chosen, load, mapping

    form = chosen(json, markdown)
    verb.run(load(plugins), variant, mapping(overrides), form)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Name of a variant.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Name of another.")],
    everything: Annotated[bool, typer.Option("--all", help="Also what is the same.")] = False,
    plugins: Plugins = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Two variants slot by slot: only what differs."""
    from trl_variants.cli import diff as verb
    from trl_variants.cli.output import chosen, load

    form = chosen(json, markdown)
    verb.run(load(plugins), a, b, everything, form)


@app.command()
def table(plugins: Plugins = None, json: Json = False, markdown: Markdown = False) -> None:
    """Every variant in six parts, with what differs from grpo emphasised."""
    from trl_variants.cli import table as verb
    from trl_variants.cli.output import chosen, load

    form = chosen(json, markdown)
    verb.run(load(plugins), form)


@app.command()
def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Only loading, names and versions, without the conformance kit.")
    ] = False,
    plugins: Plugins = None,
    json: Json = False,
) -> None:
    """Hold everything that is installed to the contract; list what is broken, disputed, shadowed or incompatible."""
    from trl_variants.cli import doctor as verb
    from trl_variants.cli.output import chosen

    if verb.run(tuple(plugins or ()), not quick, chosen(json, False)):
        raise typer.Exit(1)


@app.command("new-plugin")
def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the plugin: `mine` makes trl-variants-mine.")],
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Where to write it; a folder of its name here by default.")
    ] = None,
) -> None:
    """Write a distribution of your own: a component, a variant, and tests that hold them to the contract."""
    from trl_variants.cli import new_plugin as verb

    verb.run(name, directory)


# Verbs that need the trainer are registered from here on. Their modules import trl inside the functions, so that the
# verbs above start without it.


app.command(context_settings=train.PASS_ON)(train.check)
app.command(context_settings=train.PASS_ON)(train.train)
app.command()(demo.demo)
