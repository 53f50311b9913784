"""Fixtures for the tests of plugins, there wherever trl-variants is installed: the names of `trl_variants.testing`.

def test_it_keeps_the_contract(check_plugin):
    check_plugin("my-plugin")

def test_it_trains(train_config):
    assert len(train_config("configs/mine.yaml", steps=3)) == 3
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "check_component",
    "check_plugin",
    "check_reward_function",
    "check_variant",
    "make_batch",
    "make_rollout",
    "on_ranks",
    "train_config",
]


def _offered(name: str) -> Callable[..., Any]:
    # Imported when a test asks for it: pytest loads this module in every project of the environment.
    from trl_variants import testing

    found: Callable[..., Any] = getattr(testing, name)
    return found


@pytest.fixture
def make_rollout() -> Callable[..., Any]:
    """`trl_variants.testing.make_rollout`: a rollout from short lists."""
    return _offered("make_rollout")


@pytest.fixture
def make_batch() -> Callable[..., Any]:
    """`trl_variants.testing.make_batch`: one whole optimizer step from short lists."""
    return _offered("make_batch")


@pytest.fixture
def check_component() -> Callable[..., Any]:
    """`trl_variants.testing.check_component`: hold one component to the contract."""
    return _offered("check_component")


@pytest.fixture
def check_variant() -> Callable[..., Any]:
    """`trl_variants.testing.check_variant`: hold a whole variant to the contract."""
    return _offered("check_variant")


@pytest.fixture
def check_plugin() -> Callable[..., Any]:
    """`trl_variants.testing.check_plugin`: hold everything that a plugin registers to the contract."""
    return _offered("check_plugin")


@pytest.fixture
def check_reward_function() -> Callable[..., Any]:
    """`trl_variants.testing.check_reward_function`: call a reward function as TRL does."""
    return _offered("check_reward_function")


@pytest.fixture
def on_ranks() -> Callable[..., Any]:
    """`trl_variants.testing.on_ranks`: several ranks in one process, for components that gather."""
    return _offered("on_ranks")


@pytest.fixture
def train_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`trl_variants.testing.train_config` without its folder, which is the test's own, and without the hub."""
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    return partial(_offered("train_config"), folder=tmp_path)
