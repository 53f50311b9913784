"""``trl-variants list``: what is registered, where it comes from and what can be set."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.text import Text

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
from trl_variants.describe import number, plain
from trl_variants.errors import VariantError, did_you_mean, listing
from trl_variants.registry import Owner, Registered, Registry
from trl_variants.slots import SLOTS, Slot

__all__ = ["run"]

_OTHERS = {"variant": "named combinations", "reward_function": "what scores completions, by name in a config"}


def run(registry: Registry, slot: str | None, form: Form) -> None:
    """Print the catalogue, or one slot of it."""
    known = ("variant", *SLOTS, "reward_function")
    if slot is not None and slot not in known:
        raise VariantError(f"There is no slot '{slot}'.{did_you_mean(slot, known)} Slots: {listing(known)}.")
    if slot == "reward_function":  # TRL's own too; the other listings do without trl
        from trl_variants.trainer.trl_rewards import add_trl

        add_trl(registry)
    data = {name: _entries(registry, name) for name in known if slot in (None, name)}
    if form == "json":
        print_json(data)
    elif form == "markdown":
        print_raw(_markdown(data))
    else:
        _print(data)
        if slot is not None and slot in SLOTS:
            _print_inputs(SLOTS[slot])


# -- as data -----------------------------------------------------------------------------------


def _entries(registry: Registry, slot: str) -> list[dict[str, Any]]:
    if slot == "variant":
        return [
            {
                "name": name,
                "summary": variant.summary or "",
                "extends": variant.extends,
                "paper": variant.paper,
                **_owned(registry.owner("variant", name)),
                "problem": _problem(partial(registry.variant, name)),
            }
            for name, variant in registry.variants.items()
        ]
    if slot == "reward_function":
        return [
            {
                "name": name,
                "summary": (inspect.getdoc(function) or "").partition("\n")[0],
                **_owned(registry.owner(slot, name)),
                "problem": _problem(partial(registry.reward_function, name)),
            }
            for name, function in registry.reward_functions.items()
        ]
    return [
        {
            **_component(SLOTS[slot], registered),
            "problem": _problem(partial(registry.component, slot, name)),
        }
        for name, registered in registry.components(slot).items()
    ]


def _problem(ask: Callable[[], object]) -> str | None:
    """Why something that is registered cannot be had: two plugins claim its name."""
    try:
        ask()
    except VariantError as error:
        return str(error)
    return None


def _component(slot: Slot, registered: Registered) -> dict[str, Any]:
    info = registered.info
    parameters: dict[str, Any] = {
        name: {"type": _type(parameter.annotation), "default": plain(parameter.default)}
        for name, parameter in info.parameters.items()
    }
    parameters |= {name: {"type": "float", "default": default} for name, default in slot.parameters.items()}
    return {
        "name": info.name,
        "summary": info.summary,
        "parameters": parameters,
        "inputs": list(info.inputs),
        "min_generations": info.least_generations(),
        "formula": info.formula,
        "paper": info.paper,
        **_owned(registered.owner),
    }


def _owned(owner: Owner) -> dict[str, Any]:
    return {"distribution": owner.distribution, "version": owner.version or None}


def _type(annotation: Any) -> str:
    return inspect.formatannotation(annotation).replace("typing.", "")


# -- as text -----------------------------------------------------------------------------------


def _print(data: dict[str, list[dict[str, Any]]]) -> None:
    usual = _usual(data)
    for slot, entries in data.items():
        rows: list[tuple[str | Text, ...]] = []
        for entry in entries:
            rows.append((entry["name"], entry["summary"]))
            if entry["problem"]:
                rows.append(("", Text(entry["problem"], style="red")))
            details = " · ".join(filter(None, (_settable(entry), _source(entry, usual))))
            if details:
                rows.append(("", Text(details, style="dim")))
        heading = Text.assemble((slot, "bold"), "  ", (_heading(slot), "dim"))
        emit(heading, columns(rows or [("none", "")]), "")
    if usual:
        emit(Text(f"From {usual}, unless another distribution is named.", style="dim"))


def _print_inputs(slot: Slot) -> None:
    """What a component of one's own in this slot may name, for who asks for one slot."""
    rows: list[tuple[str | Text, ...]] = list(slot.meanings.items())
    letters = "N completions of the rollout, B of a micro-batch, T tokens, F reward functions"
    row = "B" if slot.phase == "learning" else "N"
    shape = {"": "a scalar", "N": f"({row},)", "NT": f"({row}, T)", "N1": f"({row}, 1)"}
    shapes = " or ".join(shape[name] for name in slot.shapes) + (", in the loss (B, T)" if slot.phase == "both" else "")
    emit(Text.assemble(("inputs", "bold"), "  ", ("what a component here may name", "dim")), columns(rows), "")
    emit(Text(f"It returns {shapes}. {letters}.", style="dim"))


def _heading(slot: str) -> str:
    if slot in _OTHERS:
        return _OTHERS[slot]
    count = "several, in order" if SLOTS[slot].many else "one"
    return f"{SLOTS[slot].title} ({count})"


def _settable(entry: dict[str, Any]) -> str:
    if entry.get("extends"):
        return f"extends {entry['extends']}"
    return ", ".join(f"{name}={number(p['default'])}" for name, p in entry.get("parameters", {}).items())


def _source(entry: dict[str, Any], usual: str) -> str:
    owner = _owner(entry)
    return " · ".join(filter(None, (paper_name(entry.get("paper")), owner if owner != usual else "")))


def _owner(entry: dict[str, Any]) -> str:
    return f"{entry['distribution']} {entry['version'] or ''}".strip()


def _usual(data: dict[str, list[dict[str, Any]]]) -> str:
    """The distribution that most come from; it is said once."""
    owners = [_owner(entry) for entries in data.values() for entry in entries]
    return max(owners, key=owners.count) if owners else ""


# -- as Markdown -------------------------------------------------------------------------------


def _markdown(data: dict[str, list[dict[str, Any]]]) -> str:
    sections = []
    for slot, entries in data.items():
        heading = _heading(slot)
        lines = [f"## {slot}", "", f"{heading[0].upper()}{heading[1:]}.", ""]
        rows = [
            (
                code(entry["name"]),
                " ".join(filter(None, (entry["summary"], entry["problem"]))),
                _settable(entry) if slot == "variant" else code(_settable(entry)),
                paper_link(entry.get("paper")),
                _owner(entry),
            )
            for entry in entries
        ]
        settable = "extends" if slot == "variant" else "parameters"
        header = ("name", "what it is", settable, "paper", "distribution")
        sections.append("\n".join([*lines, markdown_table(header, rows) if rows else "None."]))
    return "\n\n".join(sections)
