"""Several ranks in one process: a thread each, which meet where they gather."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["on_ranks"]

T = TypeVar("T")


def on_ranks(calls: Sequence[Callable[[Callable[[Tensor], Tensor]], T]]) -> list[T]:
    """Run one call for each rank; what it is handed concatenates a tensor over all of them, as ``gather`` does.

    Args:
        calls: A function of ``gather`` for each rank; each must gather as often as the others.

    Returns:
        What they return, in order.

    Example:
        >>> on_ranks([lambda gather, rank=rank: gather(torch.full((rank,), rank)).tolist() for rank in range(3)])
        [[1, 2, 2], [1, 2, 2], [1, 2, 2]]
    """
    barrier = threading.Barrier(len(calls), timeout=60)
    table: list[Tensor | None] = [None] * len(calls)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        def gather(tensor: Tensor) -> Tensor:
            table[rank] = tensor.detach()
            barrier.wait()
            whole = torch.cat([part for part in table if part is not None])
            barrier.wait()  # before anyone writes again
            return whole

        try:
            results[rank] = calls[rank](gather)
        except threading.BrokenBarrierError:
            errors.append(AssertionError("not every rank gathered as often as the others"))
        except BaseException as error:
            errors.insert(0, error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(calls))]
