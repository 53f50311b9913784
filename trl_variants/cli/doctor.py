"""``trl-variants doctor``: everything that is installed, held to the contract."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import Any

import typer
from rich.padding import Padding
from rich.text import Text

from trl_variants.cli.output import Form, columns, emit, fits, print_json
from trl_variants.describe import package_versions
from trl_variants.diagnosis import Diagnosis, diagnose
from trl_variants.registry import Owner

__all__ = ["run"]

_HEADER = ("plugin", "version", "registers", "contract")


def run(extra: tuple[str, ...], contract: bool, form: Form) -> bool:
    """Print what is found; True where something is wrong."""
    with redirect_stdout(sys.stderr):  # what plugins print as they are loaded and run is no part of the report
        found = diagnose(extra=extra, contract=contract, watch=_say)
    _say(None, "")
    if form == "json":
        print_json(_as_data(found))
    else:
        _print(found, contract)
    return bool(found.problems)


def _say(owner: Owner | None, what: str) -> None:
    """What is being checked, on one line of a terminal, since it takes a while."""
    if sys.stderr.isatty():
        typer.echo(f"\r\x1b[K{f'checking {owner}: {what}' if owner else ''}", err=True, nl=False)


def _as_data(found: Diagnosis) -> dict[str, Any]:
    return {
        "versions": package_versions(),
        "plugins": [
            {
                "plugin": owner.plugin,
                "distribution": owner.distribution,
                "version": owner.version or None,
                "registers": [{"slot": slot, "name": name} for slot, name in found.registry.owned(owner)],
                "contract": {
                    name: {"held": list(verdict), "exceptions": dict(verdict.exceptions)}
                    for name, verdict in found.verdicts.get(owner, {}).items()
                },
            }
            for owner in found.registry.plugins
        ],
        "problems": [
            {"kind": p.kind, "distribution": p.owner.distribution, "message": p.message} for p in found.problems
        ],
    }


def _print(found: Diagnosis, contract: bool) -> None:
    emit("  ".join(f"{name} {version}" for name, version in package_versions().items()), "")
    rows = [_row(found, owner, contract) for owner in found.registry.plugins]
    if fits(rows, _HEADER):
        emit(columns(rows, header=_HEADER))
    else:
        _section("Plugins", ((f"{name} {version}", f"{what}; contract {kept}") for name, version, what, kept in rows))
    exceptions: dict[str, list[str]] = {}
    for verdicts in found.verdicts.values():
        for name, verdict in verdicts.items():
            for rule, why in verdict.exceptions.items():
                exceptions.setdefault(f"{rule}, since {why}:", []).append(name)
    _section("Declared exceptions", {why: ", ".join(names) for why, names in exceptions.items()}.items())
    _section("Problems", ((f"{p.kind}: {p.owner}", p.message) for p in found.problems))
    if not found.problems:
        emit("", "Nothing is wrong.")


def _section(title: str, entries: Iterable[tuple[str, str]]) -> None:
    """A title, and under it each entry with its text indented; nothing where there is none."""
    entries = list(entries)
    if entries:
        emit("", Text(title, style="bold"))
    for name, text in entries:
        emit(Padding(name, (0, 0, 0, 2)), Padding(text, (0, 0, 0, 4)))


def _row(found: Diagnosis, owner: Owner, contract: bool) -> tuple[str, str, str, str]:
    owned = list(found.registry.owned(owner))
    variants = sum(slot == "variant" for slot, _ in owned)
    registers = f"{_counted(len(owned) - variants, 'component')}, {_counted(variants, 'variant')}"
    broken = [p for p in found.problems if p.owner == owner and p.kind == "contract"]
    held = sum(map(len, found.verdicts.get(owner, {}).values()))
    verdict = f"{len(broken)} break it" if broken else f"kept: {held} properties" if contract else "not checked"
    return owner.distribution, owner.version, registers, verdict


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
