"""The cut: which rows of an optimizer step share a micro-batch, so that as little padding as can be is computed.

Two layouts of a micro-batch are weighed against each other:

- plain: each row is its prompt and its completion, padded to the longest row: rows x longest tokens;
- shared: each distinct prompt is computed once, and every completion on top of it: prompts x longest prompt + rows x
  longest completion tokens.

Nothing here knows of models or trainers. Any cut gives the same loss and the same gradient, since both are sums over
rows divided by the totals of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cut", "best_cut", "plain_cut", "shared_cut"]

#: Rows squared times parts above which the exact cut takes too long: then rows are sorted and cut evenly.
LARGEST = 64_000_000
#: Memory of a cached token, which a prompt keeps for each of its rows, in units of a token's that is computed.
CACHED = 1 / 8
#: Two forwards instead of one, and the copying of a cache, in parts of the computation.
SHARING_OVERHEAD = 0.1


@dataclass(frozen=True)
class Cut:
    """Rows of an optimizer step in micro-batches.

    Attributes:
        parts: Row numbers of each micro-batch; every row is in exactly one.
        shared: Whether each distinct prompt of a micro-batch is computed once.
        tokens: Tokens that the model computes, padding included.
        cost: Tokens plus what attention adds, in units of a token's cost without attention.
    """

    parts: tuple[tuple[int, ...], ...]
    shared: bool
    tokens: int
    cost: float


def best_cut(
    prompts: Sequence[int],
    completions: Sequence[int],
    keys: Sequence[int],
    parts: int,
    *,
    largest: int,
    attention: float,
    sharing: bool = True,
    always: bool = False,
) -> Cut:
    """The cheaper of `plain_cut` and `shared_cut`.

    Args:
        prompts: Tokens of each row's prompt.
        completions: Tokens of each row's completion.
        keys: Equal for rows of one prompt.
        parts: Number of micro-batches, at most as many as rows.
        largest: Most tokens of a micro-batch.
        attention: Cost of one query-key pair, in units of a token's cost without attention.
        sharing: Whether prompts may be shared.
        always: Whether they are then shared whatever it costs.

    Example:
        >>> best_cut([2, 2, 2, 2], [1, 9, 1, 9], [0, 0, 1, 1], 2, largest=22, attention=0.0, sharing=False).parts
        ((0, 2), (1, 3))
        >>> best_cut([20, 20, 20, 20], [1, 9, 1, 9], [0, 0, 1, 1], 2, largest=58, attention=0.0).parts
        ((0, 1), (2, 3))
    """
    plain = plain_cut(prompts, completions, parts, largest=largest, attention=attention)
    if not sharing or len(set(keys)) == len(keys):
        return plain
    shared = shared_cut(prompts, completions, keys, parts, largest=largest, attention=attention)
    if shared and (always or shared.cost * (1 + SHARING_OVERHEAD) < plain.cost):
        return shared
    return plain


def plain_cut(
    prompts: Sequence[int], completions: Sequence[int], parts: int, *, largest: int, attention: float = 0.0
) -> Cut:
    """The cut into ``parts`` with the smallest sum of rows x longest, under the bound.

    Sorting first loses nothing: rows exchanged so that the longer ones meet shorten the other micro-batch.

    Args:
        prompts: Tokens of each row's prompt.
        completions: Tokens of each row's completion.
        parts: Number of micro-batches.
        largest: Most tokens of a micro-batch; at least rows / parts, rounded up, times the longest row.
        attention: Cost of one query-key pair.
    """
    lengths = np.asarray(prompts) + np.asarray(completions)
    order = np.argsort(lengths, kind="stable")
    lengths = lengths[order]
    rows = len(order)
    # rows of [start, stop) x the longest, which is the last
    tokens = (np.arange(rows + 1)[None] - np.arange(rows)[:, None]) * np.concatenate([[0], lengths])[None]
    bounds = _cheapest(tokens, parts, largest, memory=tokens) or _even(rows, parts)
    made = [(stop - start, int(lengths[stop - 1])) for start, stop in bounds]
    return Cut(
        parts=_parts(order, bounds),
        shared=False,
        tokens=sum(n * longest for n, longest in made),
        cost=float(sum(n * (longest + attention * longest**2 / 2) for n, longest in made)),
    )


def shared_cut(
    prompts: Sequence[int],
    completions: Sequence[int],
    keys: Sequence[int],
    parts: int,
    *,
    largest: int,
    attention: float = 0.0,
) -> Cut | None:
    """The cheapest cut of the rows in the order of their groups, with each distinct prompt computed once.

    Groups stand in the order of their longest completion, and rows inside a group in the order of their length. Where
    there are more micro-batches than groups, or a group is too large, one is cut, and its prompt is computed twice.

    Returns:
        The cut, or None where none is within the bound.
    """
    p, c, k = (np.asarray(values) for values in (prompts, completions, keys))
    longest = {key: int(c[k == key].max()) for key in set(keys)}
    order = np.array(sorted(range(len(k)), key=lambda i: (longest[keys[i]], keys[i], completions[i])))
    p, c, k = p[order], c[order], k[order]
    rows = len(order)
    if rows * rows * parts > LARGEST:
        return None
    count = np.arange(rows + 1)[None] - np.arange(rows)[:, None]
    changes = np.concatenate([[0], np.cumsum(k[1:] != k[:-1])])
    distinct = np.concatenate([np.zeros((rows, 1), int), changes[None] - changes[:, None] + 1], axis=1)
    longest_prompt = _running_max(p)
    tokens = distinct * longest_prompt + count * _running_max(c)
    bounds = _cheapest(tokens, parts, largest, memory=tokens + CACHED * count * longest_prompt)
    if bounds is None:
        return None
    cost = 0.0
    for start, stop in bounds:
        n, prompt, completion = stop - start, int(p[start:stop].max()), int(c[start:stop].max())
        different = len(set(k[start:stop].tolist()))
        cost += different * (prompt + attention * prompt**2 / 2)
        cost += n * completion * (1 + attention * (prompt + completion))
    return Cut(
        parts=_parts(order, bounds),
        shared=True,
        tokens=int(sum(tokens[start, stop] for start, stop in bounds)),
        cost=float(cost),
    )


def _running_max(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """[start, stop] -> the largest of values[start:stop]."""
    rows = len(values)
    table = np.where(np.arange(rows)[None] >= np.arange(rows)[:, None], values[None], 0)
    return np.concatenate([np.zeros((rows, 1), values.dtype), np.maximum.accumulate(table, axis=1)], axis=1)


def _cheapest(
    tokens: NDArray[np.int64], parts: int, largest: int, memory: NDArray[Any]
) -> list[tuple[int, int]] | None:
    """Bounds of the cheapest cut of an ordered list: the shortest path from 0 to its end in ``parts`` steps.

    Of cuts that cost the same, the most even one.

    Args:
        tokens: (rows, rows + 1): the cost of a micro-batch of [start, stop).
        parts: Number of micro-batches.
        largest: Most memory of one.
        memory: (rows, rows + 1), in tokens that are computed.

    Returns:
        (start, stop) of each; None where there is no such cut, or too many rows to look for it.
    """
    rows = tokens.shape[0]
    if rows * rows * parts > LARGEST:
        return None
    start, stop = np.arange(rows)[:, None], np.arange(rows + 1)[None]
    # Squares decide between equal sums, and never add up to a token.
    uneven = tokens.astype(float) ** 2 / (2 * parts * float(tokens.max()) ** 2 + 1)
    step = np.where((stop > start) & (memory <= largest), tokens + uneven, np.inf)
    best = np.full(rows + 1, np.inf)
    best[0] = 0.0
    came_from = []
    for _ in range(parts):
        paths = best[:-1, None] + step
        came_from.append(paths.argmin(axis=0))
        best = paths.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    bounds, end = [], rows
    for previous in reversed(came_from):
        bounds.append((int(previous[end]), end))
        end = int(previous[end])
    return bounds[::-1]


def _even(rows: int, parts: int) -> list[tuple[int, int]]:
    edges = np.linspace(0, rows, parts + 1).round().astype(int).tolist()
    return list(zip(edges[:-1], edges[1:], strict=True))


def _parts(order: NDArray[np.int64], bounds: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(order[start:stop].tolist())) for start, stop in bounds)
