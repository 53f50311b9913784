"""What TRL asks of a reward function, held against it without training."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

from trl_variants.collection import name_of
from trl_variants.conformance.running import NonConformance

__all__ = ["KINDS", "check_reward_function"]

#: How TRL hands completions over: as text, or as conversations of the assistant's message.
KINDS = ("text", "conversation")


def check_reward_function(
    function: Callable[..., Any],
    completions: Sequence[str],
    *,
    kinds: Collection[str] = KINDS,
    completion_ids: Sequence[Sequence[int]] | None = None,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Call a reward function as TRL does, and hold what it returns to what TRL and the trainer take.

    It takes whatever else is handed over, returns a finite number or None for each completion, the same for the same
    completions, changes none of its arguments, and scores text and conversations alike.

    Args:
        function: The reward function, sync or async.
        completions: What completions say.
        kinds: How they are handed over: ``"text"``, ``"conversation"`` or both. TRL's own take conversations only.
        completion_ids: Their tokens; made up when left out.
        **columns: The columns of the dataset that it reads, one value for each completion.

    Returns:
        What it gave.

    Raises:
        NonConformance: It breaks one of these.

    Example:
        >>> def length(completions, **kwargs):
        ...     return [float(len(c if isinstance(c, str) else c[-1]["content"])) for c in completions]
        >>> check_reward_function(length, ["a", "bcd"])
        [1.0, 3.0]
    """
    name, found = name_of(function), {}
    ids = completion_ids or [list(range(3, 4 + index)) for index in range(len(completions))]
    for kind in kinds:
        first = _scores(name, kind, function, completions, ids, columns)
        again = _scores(name, kind, function, completions, ids, columns)
        if first != again:
            raise NonConformance(f"reward function '{name}' gave {first} and then {again} for the same completions.")
        found[kind] = first
    first, last = found[next(iter(kinds))], found[[*kinds][-1]]
    if first != last:
        raise NonConformance(
            f"reward function '{name}' gave {first} for text and {last} for the same as conversations."
        )
    return first


def _scores(
    name: str,
    kind: str,
    function: Callable[..., Any],
    said: Sequence[str],
    ids: Sequence[Sequence[int]],
    columns: dict[str, Sequence[Any]],
) -> list[float | None]:
    def handed() -> dict[str, Any]:
        speak = _speak if kind == "conversation" else lambda role, text: text
        return {
            "prompts": [speak("user", "Say something.") for _ in said],
            "completions": [speak("assistant", text) for text in said],
            "completion_ids": [list(tokens) for tokens in ids],
            **{column: list(values) for column, values in columns.items()},
            "a_column_it_does_not_know": list(range(len(said))),
        }

    given = handed()
    called = {"trainer_state": SimpleNamespace(global_step=0), "log_extra": _ignore, "log_metric": _ignore}
    try:
        result = function(**given, **called)
        result = asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    except Exception as error:
        raise NonConformance(f"reward function '{name}' failed on a {kind}: {type(error).__name__}: {error}") from error
    if given != handed():
        changed = [key for key, value in handed().items() if given[key] != value]
        raise NonConformance(f"reward function '{name}' changed its argument {changed[0]}.")
    try:
        scores = [None if value is None else float(value) for value in result]
    except (TypeError, ValueError) as error:
        raise NonConformance(f"reward function '{name}' returned no list of numbers: {result!r}.") from error
    if len(scores) != len(said):
        raise NonConformance(f"reward function '{name}' gave {len(scores)} rewards for {len(said)} completions.")
    if any(score is not None and not math.isfinite(score) for score in scores):
        raise NonConformance(f"reward function '{name}' gave {scores}; a reward is finite, or None.")
    return scores


async def _awaited(result: Any) -> Any:
    return await result


def _speak(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def _ignore(name: str, value: Any) -> None:
    pass
