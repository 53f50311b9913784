"""Tasks of reasoning-gym, scored as each task scores itself."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_variants import VariantError
from trl_variants_rewards.texts import tagged, texts

__all__ = ["reasoning_gym"]

#: Tasks whose scorers compare tuples, which a stored dataset holds as lists.
_OF_TUPLES = ("arc_agi", "rearc")


def reasoning_gym(
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    metadata: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float]:
    """What the task of a row gives for the answer: from 0 to 1.

    Args:
        completions: Texts or conversations. The answer is what stands in the last ``<answer>...</answer>``, else all of
            the text.
        answer: The dataset's column of true answers, as reasoning-gym's entries have it; None where there are many.
        metadata: The column of the entries' metadata: mappings, or JSON of them, which keeps a dataset's schema simple.
            Its ``source_dataset`` names the task.
        **kwargs: What else TRL hands over; not read.

    Returns:
        A number for each completion.

    Raises:
        VariantError: A column is missing, a row does not say which task it is of, or is none of its entries.

    References:
        https://github.com/open-thought/reasoning-gym.
    """
    if answer is None or metadata is None:
        raise VariantError(
            "reward function 'reasoning_gym' needs the columns answer and metadata, as entries of its tasks have them."
        )
    return [_score(text, true, said) for text, true, said in zip(texts(completions), answer, metadata, strict=True)]


def _score(text: str, true: Any, said: Any) -> float:
    details = json.loads(said) if isinstance(said, str) else dict(said)
    task = details.get("source_dataset")
    if not task:
        raise VariantError(
            "reward function 'reasoning_gym': a row's metadata has no source_dataset, the name of its task."
        )
    entry = {"answer": true, "metadata": _as_tuples(details) if task in _OF_TUPLES else details}
    given = tagged(text)
    return _graded(task, text.strip() if given is None else given, entry)


def _graded(task: str, given: str, entry: Mapping[str, Any]) -> float:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some scorers print
            return float(_scorer(task)(given, entry))
    except VariantError:
        raise
    except Exception as error:  # some scorers read the answer as what it should be, and fail on anything else
        true = entry["answer"]
        if given == true:
            raise VariantError(
                f"reward function 'reasoning_gym': the scorer of {task} fails on the true answer of a row, so that the "
                f"row is no entry of it: {error!r}"
            ) from error
        if true is not None:
            _graded(task, true, entry)
        return 0.0


def _as_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_tuples(item) for key, item in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


@functools.cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn

    try:
        scorer: Callable[[str, Mapping[str, Any]], float] = get_score_answer_fn(task)
    except ValueError as error:
        raise VariantError(f"reward function 'reasoning_gym': {error}") from error
    return scorer


reasoning_gym.requires = {"reasoning_gym": "reasoning-gym"}  # type: ignore[attr-defined]
