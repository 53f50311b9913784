"""The one exception of the package, and the words that its messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["VariantError", "did_you_mean", "listing"]


class VariantError(ValueError):
    """Something about a variant, a component, a plugin or a config is wrong.

    The message says what is wrong, the nearest valid value and what exists. It is raised before a model is loaded
    wherever the mistake can be known by then.
    """


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest candidate, or nothing.

    Example:
        >>> did_you_mean("epsilon_hi", ["epsilon_low", "epsilon_high"])
        " Did you mean 'epsilon_high'?"
        >>> did_you_mean("zzz", ["epsilon_low"])
        ''
    """
    close = difflib.get_close_matches(str(name), list(candidates), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def listing(names: Iterable[object]) -> str:
    """Join names for a message: ``a, b, c``, or ``nothing``."""
    return ", ".join(str(name) for name in names) or "nothing"
