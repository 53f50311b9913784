"""Completions as text, and where in it the answer stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["tagged", "texts"]

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def texts(completions: Sequence[Any]) -> list[str]:
    """What each completion says: itself, or the last message of a conversation.

    Example:
        >>> texts(["a", [{"role": "assistant", "content": "b"}]])
        ['a', 'b']
    """
    return [c if isinstance(c, str) else _content(c[-1]["content"] if c else "") for c in completions]


def tagged(text: str) -> str | None:
    """What stands in the last ``<answer>...</answer>`` of a text; None without one.

    Example:
        >>> tagged("<answer>1</answer>, no: <answer> 2 </answer>")
        '2'
    """
    found = _TAGGED.findall(text)
    return found[-1].strip() if found else None


def _content(content: Any) -> str:
    """A message's text, which may be in parts beside images."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)
