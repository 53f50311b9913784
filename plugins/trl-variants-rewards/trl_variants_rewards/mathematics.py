r"""Answers of mathematics, compared as mathematics by math-verify: ``\frac{1}{2}``, ``0.5`` and ``1/2`` are one.

TRL's own ``accuracy_reward`` does the same for conversations with a LaTeX ``solution``. Here a completion may be plain
text, and the true answer an expression, or a worked solution of GSM8K that ends in ``#### 72``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from trl_variants import VariantError
from trl_variants_rewards.texts import texts

__all__ = ["math_verify"]


def math_verify(
    completions: Sequence[Any],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""1 where the answer of a completion equals the true one, 0 where it does not, None where there is no true one.

    Args:
        completions: Texts or conversations. The last boxed expression counts, else the last number or formula.
        solution: The dataset's column of true answers: LaTeX, an expression, a number, or a solution that ends in
            ``#### 72``.
        answer: The same, where the column is called so.
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
    main = threading.current_thread() is threading.main_thread()
    limits = (
        ({"parsing_timeout": 5}, {"timeout_seconds": 5})
        if main
        else ({"parsing_timeout": None}, {"timeout_seconds": None})
    )
    reading, comparing = limits

    def score(text: str, true: Any) -> float | None:
        stated = str(true).rpartition("####")[2].strip()
        gold = library.parse(stated, **reading) or library.parse(f"\\boxed{{{stated}}}", **reading)
        if true is None or not stated or not gold:
            return None
        return float(library.verify(gold, library.parse(text, **reading), **comparing))

    return [score(text, true) for text, true in zip(texts(completions), golds, strict=True)]


math_verify.requires = {"math_verify": "math-verify"}  # type: ignore[attr-defined]
