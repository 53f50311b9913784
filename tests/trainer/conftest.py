"""Shared by the tests of the trainer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests import tiny


@pytest.fixture(scope="session", autouse=True)
def _quick() -> Iterator[None]:
    """One thread: a model this small only waits for a second one. And what imports made is never garbage."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    import trl_variants.trainer.trainer  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model and its tokenizer in a folder."""
    return tiny.saved(tmp_path_factory.mktemp("model"))
