"""Shared by the tests of this plugin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model and its tokenizer in a folder; scaled up, so that entropies differ much from token to token."""
    return tiny.saved(tmp_path_factory.mktemp("model"), scale=16.0)


@pytest.fixture
def together() -> Callable[..., list[Any]]:
    """Several ranks in one process: each runs in a thread, and ``gather`` waits for all of them."""
    return _together


def _together(calls: Sequence[Callable[[Callable[[Tensor], Tensor]], Any]]) -> list[Any]:
    """Run one call per rank, each with a ``gather`` that concatenates over all; what they return.

    As with accelerate, a gather fails where ranks bring tensors of different shapes.
    """
    barrier, brought = threading.Barrier(len(calls), timeout=30), [torch.empty(0)] * len(calls)

    def gather_of(rank: int) -> Callable[[Tensor], Tensor]:
        def gather(tensor: Tensor) -> Tensor:
            brought[rank] = tensor
            barrier.wait()
            shapes = {part.shape for part in brought}
            assert len(shapes) == 1, f"ranks gather tensors of different shapes: {shapes}"
            whole = torch.cat(brought)
            barrier.wait()
            return whole

        return gather

    def run(rank: int) -> Any:
        try:
            return calls[rank](gather_of(rank))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, range(len(calls))))
