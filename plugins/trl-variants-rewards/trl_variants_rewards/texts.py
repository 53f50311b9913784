"""Completions as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["texts"]


def texts(completions: Sequence[Any]) -> list[str]:
    """The text of each completion: itself, or what the last message of a conversation says.

    Example:
        >>> texts(["a", [{"role": "assistant", "content": "b"}]])
        ['a', 'b']
    """
    return [c if isinstance(c, str) else str(c[-1]["content"] or "") for c in completions]
