r"""LaTeX formulas as one line of Unicode, for terminals: ``\hat A_{i,t}`` becomes ``Âᵢₜ``.

It reads the small part of LaTeX that formulas of losses are written in. What it does not know it leaves as a word, so
that a plugin's formula may look plain but never loses a part. Fractions get the parentheses that keep their meaning:
``\log\frac{a}{b - 1}`` is ``log(a/(b - 1))``.
"""

from __future__ import annotations

import re
import unicodedata

__all__ = ["to_unicode"]

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[{}^_]|\s+|[^\\{}^_\s]")

#: Commands that are one sign. Greek letters are looked up by their names instead.
_SIGNS = {
    "cdot": "·", "times": "×", "pm": "±", "leftarrow": "←", "gets": "←", "to": "→", "rightarrow": "→", "le": "≤",
    "leq": "≤", "ge": "≥", "geq": "≥", "neq": "≠", "ne": "≠", "approx": "≈", "sim": "~", "in": "∈", "sum": "Σ",
    "prod": "∏", "dots": "…", "ldots": "…", "cdots": "⋯", "ell": "ℓ", "infty": "∞", "mid": "|", "lvert": "|",
    "rvert": "|", "nabla": "∇", "partial": "∂", "sqrt": "√", "top": "ᵀ",
    "quad": " ", "qquad": " ", ",": " ", ";": " ", ":": " ", " ": " ", "!": "", "left": "", "right": "",
    "big": "", "Big": "", "bigl": "", "bigr": "", "displaystyle": "",
}  # fmt: skip
_FONTS = frozenset({"text", "textbf", "textit", "mathrm", "mathbf", "mathit", "operatorname", "mathsf", "texttt"})
_SCRIPT_LETTERS = {"L": "ℒ", "J": "𝒥", "D": "𝒟", "E": "ℰ", "F": "ℱ", "H": "ℋ"}
_BLACKBOARD_LETTERS = {"E": "𝔼", "R": "ℝ", "1": "𝟙"}
_ACCENTS = {"hat": "\u0302", "bar": "\u0304", "tilde": "\u0303", "widehat": "\u0302", "overline": "\u0304"}
_SUBSCRIPTS = str.maketrans("0123456789+-aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ")
_SUPERSCRIPTS = str.maketrans("0123456789+-()iknlst", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁱᵏⁿˡˢᵗ")
_INDEX = re.compile(r"(?:[aehijklmnoprstuvx]|-?\d+)(?:[+-](?:[aehijklmnoprstuvx]|\d+))?")
_POWER = re.compile(r"[+-]?(?:\d+|[inlst])(?:[+-](?:\d+|[inlst]))?|(?:\((?:\d+|[iknlst])\))+")
#: Stands behind the name of a function until it is known whether a space must follow.
_APPLY = "\u2061"


def to_unicode(latex: str) -> str:
    r"""Write a LaTeX formula as one line of Unicode.

    Example:
        >>> to_unicode(r"\hat A_i = r_i - \frac{1}{G-1} \sum_{j \neq i} r_j")
        'Âᵢ = rᵢ - 1/(G-1) Σ_{j≠i} rⱼ'
        >>> to_unicode(r"\log\frac{\pi_{\text{ref}}}{\pi_\theta}")
        'log(π_ref/π_θ)'
    """
    reader, text = _Reader(_TOKEN.findall(latex)), ""
    while reader.tokens:  # more than once if a brace closes that none opened
        text += reader.rest()
    text = re.sub(_APPLY + r"(?=\w)", " ", text).replace(_APPLY, "")
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"([(\[]) | (?=×)|(?<=×) ", r"\1", text)
    return re.sub(r" ([)\],])", r"\1", text)


class _Reader:
    """Reads tokens from left to right into pieces of text."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.pieces: list[str] = []

    def rest(self) -> str:
        """Everything up to the closing brace, or to the end."""
        outer, self.pieces = self.pieces, []
        while self.tokens:
            token = self.tokens.pop(0)
            if token == "}":
                break
            self._read(token)
        inner, self.pieces = self.pieces, outer
        return "".join(inner)

    def _read(self, token: str) -> None:
        if token == "{":
            self.pieces.append(self.rest())
        elif token in ("^", "_"):
            self._script(token)
        elif token.startswith("\\"):
            self._command(token[1:])
        else:
            self.pieces.append(" " if token.isspace() else token)

    def _argument(self) -> str:
        """The next group, command or character."""
        while self.tokens and self.tokens[0].isspace():
            self.tokens.pop(0)
        if not self.tokens:
            return ""
        token = self.tokens.pop(0)
        if token == "{":
            return self.rest()
        outer, self.pieces = self.pieces, []
        self._read(token)
        inner, self.pieces = self.pieces, outer
        return "".join(inner)

    def _command(self, name: str) -> None:
        if name in _SIGNS:
            if name in ("left", "right") and self.tokens[:1] == ["."]:
                self.tokens.pop(0)
            self.pieces.append(_SIGNS[name])
        elif name in _FONTS:
            self.pieces.append(self._argument() + ("" if name.startswith("text") else _APPLY))
        elif name in ("frac", "tfrac", "dfrac"):
            self._fraction()
        elif name in _ACCENTS:
            self.pieces.append(unicodedata.normalize("NFC", self._argument() + _ACCENTS[name]))
        elif name in ("mathcal", "mathbb"):
            letter = self._argument()
            letters = _SCRIPT_LETTERS if name == "mathcal" else _BLACKBOARD_LETTERS
            self.pieces.append(letters.get(letter, letter))
        elif not name.isalpha():
            self.pieces.append(name)
        else:
            self.pieces.append(_greek(name) or name + _APPLY)

    def _fraction(self) -> None:
        above, below = self._argument(), self._argument()
        if (above, below) == ("1", "2"):
            self.pieces.append("½")
            return
        text = f"{_grouped(above, '+-')}/{_grouped(below, '+-·/× ')}"
        before = "".join(self.pieces).rstrip()
        self.pieces.append(f"({text})" if before.endswith(_APPLY) else text)

    def _script(self, mark: str) -> None:
        content = self._argument().replace(_APPLY, "")
        applied = bool(self.pieces) and self.pieces[-1].endswith(_APPLY)
        if applied:
            self.pieces[-1] = self.pieces[-1].removesuffix(_APPLY)
        self.pieces.append(_subscript(content) if mark == "_" else _superscript(content))
        if applied:
            self.pieces.append(_APPLY)


def _greek(name: str) -> str | None:
    """The letter of a name such as ``theta``, ``Delta`` or ``varepsilon``."""
    plain = name.removeprefix("var")
    plain = {"lambda": "lamda", "Lambda": "Lamda"}.get(plain, plain)
    try:
        return unicodedata.lookup(f"GREEK {'SMALL' if plain.islower() else 'CAPITAL'} LETTER {plain.upper()}")
    except KeyError:
        return None


def _grouped(text: str, signs: str) -> str:
    """In parentheses, if one of the signs stands outside of all brackets."""
    text = text.strip()
    outside, depth, bar = "", 0, False
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        bar ^= character == "|"
        if depth == 0 and not bar:
            outside += character
    return f"({text})" if any(sign in outside[1:] for sign in signs) else text


def _subscript(content: str) -> str:
    parts = [re.sub(r"\s", "", part) for part in content.split(",")]
    if all(_INDEX.fullmatch(part) for part in parts):
        return "".join(parts).translate(_SUBSCRIPTS)
    joined = ",".join(parts)
    return f"_{joined}" if joined.isalnum() else f"_{{{joined}}}" if joined else ""


def _superscript(content: str) -> str:
    compact = re.sub(r"\s", "", content)
    if _POWER.fullmatch(compact):
        return compact.translate(_SUPERSCRIPTS)
    return f"^{compact}" if compact.isalnum() else f"^({content.strip()})" if compact else ""
