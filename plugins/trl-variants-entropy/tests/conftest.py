"""Shared by the tests of this plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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
