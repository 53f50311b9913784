r"""The objective that a recipe minimizes, composed from the formulas of its components.

A component's ``formula`` is LaTeX with its parameters in braces: ``1 - {epsilon_low}``. Such a brace is a parameter
unless it directly follows a command, whose argument it then is (``\mathrm{clip}``); inside an argument it is written
twice (``\frac{n}{{horizon}}``). A component without a formula stands there by its name and its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from trl_variants.binding import Bound
from trl_variants.recipe import Recipe
from trl_variants.slots import SLOTS
from trl_variants.unicode_math import to_unicode

__all__ = ["defaults_of", "formula", "formula_text", "number"]

_ADVANTAGE, _RATIO = r"\hat A_{i,t}", r"\rho_{i,t}"
_STEP_MEAN = r"\frac{1}{\sum_i |o_i|} \sum_i \sum_t"


def formula(recipe: Recipe) -> list[str]:
    r"""Return the objective as lines of LaTeX: the loss first, then what its symbols stand for.

    Example:
        >>> from trl_variants import resolve
        >>> formula(resolve("rloo"))[-1]
        '\\beta = 0.05'
    """
    return list(_lines(recipe))


def formula_text(recipe: Recipe) -> list[str]:
    """Return the lines of `formula` in Unicode.

    Example:
        >>> from trl_variants import resolve
        >>> formula_text(resolve("reinforce", {"token_weight": "none"}))
        ['ℒ = 1/N Σᵢ Σₜ [-Âᵢ log π_θ(oᵢₜ)]', 'Âᵢ = rᵢ - 0']
    """
    return [to_unicode(line) for line in formula(recipe)]


def _lines(recipe: Recipe) -> Iterator[str]:
    clip, kl, ratio = recipe.clip_rule, recipe.kl, recipe.importance_ratio
    name_symbols = _symbols(recipe)
    policy = name_symbols(_term(clip))
    aside = not _is_one_term(policy)
    terms = r"\ell_{i,t}" if aside else policy
    if recipe.token_weights and "token_weights" not in clip.info.inputs:
        terms += r" \cdot w_{i,t}"
    if kl and not kl.in_reward:
        terms += " " + name_symbols(_kl_term(kl.placement))
    loss = rf"\mathcal{{L}} = {_term(recipe.loss_aggregator)} \left[ {terms} \right]"
    for regularizer in recipe.regularizers:
        loss += f" {_coefficient(regularizer)}{_STEP_MEAN} \\left( {_first(_term(regularizer))} \\right)"
    yield loss

    if aside:
        yield rf"\ell_{{i,t}} = {policy}{_unsaid(clip)}"
    for bound in (recipe.loss_aggregator, *(() if aside else (clip,)), *recipe.regularizers):
        if bound.info.formula and (note := _unsaid(bound)):
            yield rf"\text{{{_escaped(bound.name)}}}{note}"
    for regularizer in recipe.regularizers:
        yield from _rest(_term(regularizer))
    weighted = kl and not kl.in_reward and kl.placement.parameters.get("weighted")
    if "log_ratio" in clip.info.inputs or weighted:
        yield _definition(ratio, _RATIO)
    yield from _weights(recipe.token_weights)
    yield from _advantages(recipe.advantage_estimator, *recipe.advantage_normalizers)

    before = [s for s in recipe.reward_shapers if not s.info.after_kl]
    after = [s for s in recipe.reward_shapers if s.info.after_kl]
    yield from map(_reward, before)
    if kl and kl.in_reward:
        yield _definition(kl.placement, "r_i", r"\leftarrow")
    yield from map(_reward, after)
    if kl:
        yield _definition(kl.estimator, r"\mathrm{KL}_{i,t}")
        start = rf"\beta = {number_latex(kl.coef)}"
        moves = rf" \text{{ at the start}}, \quad {_term(kl.controller)}{_unsaid(kl.controller)}"
        yield start if kl.controller.name == "fixed" else start + moves
    for sample_filter in recipe.sample_filters:
        yield _term(sample_filter) + _unsaid(sample_filter)


# -- the parts ---------------------------------------------------------------------------------


def _term(bound: Bound) -> str:
    """A component's formula with its parameters filled in, or its name with them."""
    if not bound.info.formula:
        return rf"\text{{{_escaped(bound.name)}}}{_unsaid(bound)}"
    names = "|".join(map(re.escape, bound.parameters))
    if not names:
        return bound.info.formula
    return re.sub(rf"(\\[A-Za-z]+|[}}_^])?\{{({names})\}}", lambda match: _filled(match, bound), bound.info.formula)


def _filled(match: re.Match[str], bound: Bound) -> str:
    before, name = match.group(1) or "", match.group(2)
    if before.startswith("\\"):
        return match.group(0)
    value = number_latex(bound.parameters[name])
    if before:  # an argument or an index: it keeps its braces
        return f"{before}{{{value}}}"
    factor = re.search(r"(?:[-+]|\\cdot|\\times|\\,)\s*$", match.string[: match.start()])
    return f"({value})" if value.startswith("-") and (factor or match.string[match.end() :][:1] == "^") else value


def _unsaid(bound: Bound) -> str:
    """Parameters that the formula does not show and that are not what they are by default."""
    formula, slot_own = bound.info.formula, SLOTS[bound.slot].parameters
    defaults = defaults_of(bound)
    unsaid = [
        name
        for name, value in bound.parameters.items()
        if name not in slot_own
        and not (name == "parts" and bound.parts)  # each has lines of its own
        and not (bound.slot == "kl_placement" and name == "weighted")
        and (not formula or (f"{{{name}}}" not in formula and value != defaults[name]))
    ]
    said = r",\, ".join(rf"\text{{{_escaped(name)}}} = {number_latex(bound.parameters[name])}" for name in unsaid)
    return rf" \;({said})" if said else ""


def _definition(bound: Bound, symbol: str, sign: str = "=") -> str:
    """``symbol = formula``; the formula alone where it already says what it defines."""
    term = _term(bound)
    note = _unsaid(bound) if bound.info.formula else ""
    return (term if _says_what_it_defines(bound) else f"{symbol} {sign} {term}") + note


def _advantages(estimator: Bound, *normalizers: Bound, place: str = "") -> Iterator[str]:
    """What an estimator makes, then what its parts do, numbered ``(1)``, ``(2)``, ``(2)(1)``, then its normalizers."""

    def placed(line: str) -> str:
        if place:
            line = line.replace(r"\hat A^{(k)}", rf"\hat A^{{{place}(k)}}")
            line = re.sub(r"\\hat A(?!\^)", lambda _: rf"\hat A^{{{place}}}", line)
        return line

    yield placed(_definition(estimator, _ADVANTAGE))
    for index, part in enumerate(estimator.parts, 1):
        yield from _advantages(*part, place=f"{place}({index})")
    for normalizer in normalizers:
        yield placed(_as_estimated(_definition(normalizer, _ADVANTAGE, r"\leftarrow"), estimator))


def _reward(shaper: Bound) -> str:
    """A shaper that names rewards returns the new ones; another one a term to add."""
    symbol = "r_{i,t}" if "token_rewards" in shaper.info.inputs else "r_i"
    if {"rewards", "token_rewards"} & set(shaper.info.inputs) or _says_what_it_defines(shaper):
        return _definition(shaper, symbol, r"\leftarrow")
    term = _term(shaper)
    term = f"- {term[1:].lstrip()}" if term.startswith("-") else f"+ {term}"
    return rf"{symbol} \leftarrow {symbol} {term}" + (_unsaid(shaper) if shaper.info.formula else "")


def _as_estimated(line: str, estimator: Bound) -> str:
    """Write the advantage of a completion as one of a token, where the estimator makes one for each token."""
    per_token = _term(estimator).startswith(_ADVANTAGE)
    return re.sub(r"\\hat A_i(?!\w)", lambda _: _ADVANTAGE, line) if per_token else line


def _weights(weights: tuple[Bound, ...]) -> Iterator[str]:
    if len(weights) == 1:
        yield _definition(weights[0], "w_{i,t}")
    elif weights:
        names = [rf"\text{{{_escaped(weight.name)}}}" for weight in weights]
        yield r"w_{i,t} = " + r" \cdot ".join(names)
        yield from (_definition(weight, name) for weight, name in zip(weights, names, strict=True))


def _kl_term(placement: Bound) -> str:
    term = _term(placement)
    weighted = placement.parameters.get("weighted")
    if weighted:
        factor = rf"\mathrm{{sg}}[{_RATIO}]" if weighted == "detached" else _RATIO
        term = term.replace(r"\mathrm{KL}", rf"{factor}\, \mathrm{{KL}}")
    return term if term.lstrip().startswith(("+", "-")) else f"+ {term}"


def _coefficient(regularizer: Bound) -> str:
    coef = regularizer.parameters["coef"]
    sign = "-" if coef < 0 else "+"
    return f"{sign} " if abs(coef) == 1 else rf"{sign} {number_latex(abs(coef))} \cdot "


def _symbols(recipe: Recipe) -> Callable[[str], str]:
    """Write the ratio and the advantage in the loss as the components that make them do: with or without t."""
    short: list[tuple[str, str]] = []
    per_token = any("{i,t" in _term(normalizer) for normalizer in recipe.advantage_normalizers)
    if _term(recipe.advantage_estimator).startswith(r"\hat A_i ") and not per_token:
        short.append((_ADVANTAGE, r"\hat A_i"))
    if _term(recipe.importance_ratio).startswith(r"\rho_i "):
        short.append((_RATIO, r"\rho_i"))

    def write(term: str) -> str:
        for long, brief in short:
            term = term.replace(long, brief)
        return term

    return write


# -- reading LaTeX -----------------------------------------------------------------------------


def _is_one_term(term: str) -> bool:
    """Whether a term can stand inside a sum: it has no second clause."""
    return r"\quad" not in term and r"\text{ where" not in term


def _first(term: str) -> str:
    return re.split(r",?\s*\\quad", term)[0]


def _rest(term: str) -> list[str]:
    return [clause.strip() for clause in re.split(r",?\s*\\quad", term)[1:]]


def _says_what_it_defines(bound: Bound) -> bool:
    """Whether ``=`` or an arrow stands outside of all braces of a component's formula."""
    outside, before = bound.info.formula or "", ""
    while outside != before:
        before, outside = outside, re.sub(r"\{[^{}]*\}", "", outside)
    return "=" in outside or r"\leftarrow" in outside or r"\gets" in outside


def _escaped(name: str) -> str:
    return re.sub(r"([_#%&$])", r"\\\1", name)


# -- values ------------------------------------------------------------------------------------


def defaults_of(bound: Bound) -> dict[str, Any]:
    """The defaults of a component's parameters and of those that its slot adds."""
    own = {name: parameter.default for name, parameter in bound.info.parameters.items()}
    return {**own, **SLOTS[bound.slot].parameters}


def number(value: Any) -> str:
    """A value as one writes it in YAML: every digit, and no more.

    Example:
        >>> [number(v) for v in (5.0, 0.28, 3e-4, 1e-06, None, True, "token", [1.0, None])]
        ['5', '0.28', '3e-4', '1e-6', 'null', 'true', 'token', '[1, null]']
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(number, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {number(item)}' for key, item in value.items())}}}"
    if not isinstance(value, float):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    exact = Decimal(repr(value)).normalize()
    return f"{exact:e}".replace("e+", "e") if abs(value) < 1e-3 or abs(value) >= 1e9 else f"{exact:f}"


def number_latex(value: Any) -> str:
    r"""A value in a formula.

    Example:
        >>> [number_latex(v) for v in (0.28, 3e-4, 1e-6, None, "sequence_mask")]
        ['0.28', '3 \\times 10^{-4}', '10^{-6}', '\\text{none}', '\\text{sequence\\_mask}']
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return r"\text{none}" if value is None else rf"\text{{{_escaped(number(value))}}}"
    mantissa, _, exponent = number(value).partition("e")
    if not exponent:
        return mantissa
    power = f"10^{{{exponent}}}"
    return power if mantissa == "1" else rf"{mantissa} \times {power}"
