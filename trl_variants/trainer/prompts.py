"""The trainer's own stream of prompts: seeded, endless, and at a position that a checkpoint can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from trl_variants.errors import VariantError

__all__ = ["PromptStream"]


class PromptStream:
    """Rows of a dataset, epoch after epoch: in every epoch each row once, whatever the numbers that are taken.

    A map-style dataset is walked in an order that (seed, epoch) fixes, or in its own; an iterable one as it iterates,
    begun anew at its end. Two streams that were made alike give the same rows, so that all processes can share one.

    Args:
        dataset: Map-style (``len`` and an index), or iterable only.
        seed: Fixes the order.
        shuffle: Whether to shuffle; an iterable dataset by its own ``shuffle``, which works in a buffer.

    Example:
        >>> stream = PromptStream([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], seed=0, shuffle=False)
        >>> [row["prompt"] for row in stream.take(4)], stream.state()
        (['a', 'b', 'c', 'a'], {'epoch': 1, 'index': 1})
    """

    def __init__(self, dataset: Any, *, seed: int, shuffle: bool = True) -> None:
        self._indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if shuffle and not self._indexed and hasattr(dataset, "shuffle"):
            dataset = dataset.shuffle(seed=seed)
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._epoch = self._index = 0
        self._rows: Iterator[Any] | None = None

    def take(self, count: int) -> list[Any]:
        """Take the next rows, across the ends of epochs.

        Args:
            count: How many.

        Returns:
            The rows, ``count`` of them.

        Raises:
            VariantError: The dataset is empty.
        """
        taken: list[Any] = []
        while len(taken) < count:
            if self._rows is None:
                self._rows = self._walk()
            new = list(islice(self._rows, count - len(taken)))
            taken += new
            self._index += len(new)
            if len(taken) < count:
                if not self._index:
                    raise VariantError("The training dataset is empty, so there is no prompt to draw.")
                self._epoch, self._index, self._rows = self._epoch + 1, 0, None
        return taken

    def state(self) -> dict[str, int]:
        """The position: the epoch, and how many rows of it were taken."""
        return {"epoch": self._epoch, "index": self._index}

    def load(self, state: dict[str, int]) -> None:
        """Go to a position that `state` returned; an iterable dataset is skipped to it."""
        self._epoch, self._index, self._rows = state["epoch"], state["index"], None

    def _walk(self) -> Iterator[Any]:
        """The rest of the epoch."""
        if self._indexed:
            return (self._dataset[i] for i in self._order()[self._index :])
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        return islice(iter(self._dataset), self._index, None)

    def _order(self) -> list[int]:
        rows = len(self._dataset)
        if not self._shuffle:
            return list(range(rows))
        digest = hashlib.sha256(f"{self._seed}|{self._epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        order: list[int] = torch.randperm(rows, generator=generator).tolist()
        return order
