"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.reading import PLUGIN


@pytest.fixture
def builtins_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugin that happens to be installed changes what is printed."""
    monkeypatch.setenv("TRL_VARIANTS_PLUGINS", "none")


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    """A plugin in one file, by its path."""
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return str(path)
