"""``trl-variants diff``: two variants slot by slot."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from trl_variants.binding import Bound
from trl_variants.cli.output import Form, code, columns, emit, markdown_table, print_json, print_raw
from trl_variants.describe import models, number, recipe_dict, settings_of, slots_of, written_kl
from trl_variants.recipe import Recipe
from trl_variants.registry import Registry
from trl_variants.resolution import resolve

__all__ = ["run"]

#: One line: what is compared, how each side is shown, and whether they are the same.
Line = tuple[str, str, str, bool]


def run(registry: Registry, a: str, b: str, everything: bool, form: Form) -> None:
    """Print what differs between two variants; with ``everything`` also what does not."""
    first, second = resolve(a, registry=registry), resolve(b, registry=registry)
    lines = _lines(first, second)
    shown = [line for line in lines if everything or not line[3]]
    same = [name for name, _, _, equal in lines if equal]
    if form == "json":
        print_json(_data(first, second, lines, everything))
    elif form == "markdown":
        rows = [
            (code(name), *(f"**{side}**" if everything and not equal else side for side in (left, right)))
            for name, left, right, equal in shown
        ]
        print_raw(markdown_table(("", a, b), rows) if rows else f"`{a}` and `{b}` are the same.")
    elif not shown:
        print_raw(f"{a} and {b} are the same.")
    else:
        cells = [
            (Text(name, style="cyan"), *(Text(side, style="dim" if equal else "") for side in (left, right)))
            for name, left, right, equal in shown
        ]
        emit(columns(cells, header=("", a, b)))
        if same and not everything:
            emit("", Text(f"The same: {', '.join(same)}.", style="dim"))


def _lines(a: Recipe, b: Recipe) -> list[Line]:
    left, right = slots_of(a), slots_of(b)
    lines: list[Line] = []
    for slot in left:
        if slot.startswith("kl_") and not (a.kl and b.kl):
            if slot == "kl_estimator":
                lines.append(("kl", written_kl(a.kl), written_kl(b.kl), a.kl is b.kl))
            continue
        one, other = left[slot], right[slot]
        lines.append((slot, _side(one, other), _side(other, one), _key(one) == _key(other)))
        if slot == "kl_controller" and a.kl and b.kl:
            lines.append(("kl coef", number(a.kl.coef), number(b.kl.coef), a.kl.coef == b.kl.coef))
    mine, yours = settings_of(a.variant), settings_of(b.variant)
    lines += [(name, number(mine[name]), number(yours[name]), mine[name] == yours[name]) for name in mine]
    least, its = a.min_generations, b.min_generations
    lines.append(("least generations", number(least), number(its), least == its))
    here, there = (", ".join(model.describe() for model in models(recipe)) for recipe in (a, b))
    lines.append(("models", here, there, here == there))
    return lines


def _key(filled: tuple[Bound, ...]) -> list[tuple[Any, ...]]:
    return [(bound.name, bound.owner, dict(bound.parameters)) for bound in filled]


def _side(filled: tuple[Bound, ...], others: tuple[Bound, ...]) -> str:
    """Components with the parameters in which they differ from the other side; all of them where it has another."""
    facing = {bound.name: bound.parameters for bound in others}
    said = []
    for bound in filled:
        known = facing.get(bound.name, {})
        parameters = [
            f"{name}={number(value)}"
            for name, value in bound.parameters.items()
            if name not in known or known[name] != value
        ]
        said.append(" ".join([bound.name, *parameters]))
    return ", ".join(said) or "none"


def _data(a: Recipe, b: Recipe, lines: list[Line], everything: bool) -> dict[str, Any]:
    """Each line with both sides in full, as `show` has them."""
    one, other = recipe_dict(a), recipe_dict(b)
    full: dict[str, tuple[Any, Any]] = {slot: (one["slots"][slot], other["slots"][slot]) for slot in one["slots"]}
    full["kl"] = (one["kl"], other["kl"])
    full |= {name: (one["settings"][name], other["settings"][name]) for name in one["settings"]}
    full["min_generations"] = (a.min_generations, b.min_generations)
    full["models"] = ([m._asdict() for m in models(a)], [m._asdict() for m in models(b)])
    return {
        "a": a.variant.name,
        "b": b.variant.name,
        "differences": {name: {"a": x, "b": y} for name, (x, y) in full.items() if x != y},
        **({"same": {name: x for name, (x, y) in full.items() if x == y}} if everything else {}),
    }
