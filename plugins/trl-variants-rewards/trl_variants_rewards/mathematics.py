r"""Answers of mathematics, compared as mathematics by math-verify: ``\frac{1}{2}``, ``0.5`` and ``1/2`` are one.

TRL's ``accuracy_reward`` compares in the same way, and reads less: only conversations, only answers in LaTeX, and a
true answer without ``$`` around it only up to its first number (``2\sqrt{3}`` as 2, ``3x`` as 3, ``(3, \pi)`` as 3).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from trl_variants import VariantError
from trl_variants_rewards.texts import tagged, texts

__all__ = ["math_verify"]

#: A text that says itself where its mathematics is.
_MARKED = re.compile(r"\$.*\$|\\\(|\\\[|\\boxed\b", re.DOTALL)
#: Two words in a row, once LaTeX's own are taken out: prose.
_LATEX = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
_PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")


def math_verify(
    completions: Sequence[Any],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    log_extra: Callable[[str, list[str]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""1 where the answer of a completion equals the true one, 0 where it does not, None where there is no true one.

    Numbers are equal where they agree in 6 decimal places.

    Args:
        completions: Texts or conversations. Of what follows a thought (``</think>``), what stands in
            ``<answer>...</answer>`` counts, else what is boxed (what is boxed together is a set), else the formula or
            number that is announced as the answer, else the last one.
        solution: The dataset's column of true answers: an expression with or without ``$``, a number, a worked solution
            with its answer boxed, or one of GSM8K's that ends in ``#### 72``.
        answer: The same, where the column is called so; ``solution`` counts where there are both.
        log_extra: TRL's; what was read goes into the table of completions.
        **kwargs: What else TRL hands over; not read.

    Returns:
        A number or None for each completion. None where the true answer cannot be read.

    Raises:
        VariantError: The dataset has neither column.

    References:
        https://github.com/huggingface/Math-Verify.
    """
    import math_verify as library

    golds = answer if solution is None else solution
    if golds is None:
        raise VariantError("reward function 'math_verify' needs the true answers: a column solution or answer.")
    # Its timeouts are signals, which only the main thread gets.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    where = [library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()]

    def parsed(text: str) -> list[Any]:
        found: list[Any] = library.parse(text, extraction_config=where, parsing_timeout=limit)
        return found

    known = {gold: _expression(str(gold).rpartition("####")[2].strip(), parsed) for gold in {*golds} - {None}}
    scores: list[float | None] = []
    read: list[list[Any]] = []
    for text, gold in zip(texts(completions), golds, strict=True):
        said = text.rpartition("</think>")[2]
        inside = tagged(said)
        read.append(parsed(said) if inside is None else _expression(inside, parsed))
        true = known.get(gold)
        scores.append(float(library.verify(true, read[-1], timeout_seconds=limit)) if true else None)
    if log_extra is not None:
        log_extra("math_verify_true", [str(known.get(gold) or "unreadable") for gold in golds])
        log_extra("math_verify_read", [str(found or "unreadable") for found in read])
    return scores


def _expression(text: str, parsed: Callable[[str], list[Any]]) -> list[Any]:
    """A text that is an answer, all of it, unless it is prose or says where its mathematics is."""
    whole = f"\\boxed{{{text}}}"
    in_part = _MARKED.search(text) or _PROSE.search(_LATEX.sub(" ", text))
    first, second = (text, whole) if in_part else (whole, text)
    return (parsed(first) or parsed(second)) if text else []


math_verify.requires = {"math_verify": "math-verify"}  # type: ignore[attr-defined]
