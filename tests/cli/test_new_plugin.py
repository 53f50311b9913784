"""``trl-variants new-plugin``: what it writes is a distribution whose tests pass as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trl_variants.cli.main import app

ROOT = Path(__file__).parents[2]
FILES = [
    ".gitignore",
    "README.md",
    "configs/fresh_idea.yaml",
    "pyproject.toml",
    "tests/test_fresh_idea.py",
    "trl_variants_fresh_idea.py",
]


def python(*arguments: str, cwd: Path, paths: tuple[Path, ...]) -> str:
    """What a command of Python says; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "trl-variants-fresh-idea"
    done = CliRunner().invoke(app, ["new-plugin", "Fresh idea", "--directory", str(folder)])
    assert done.exit_code == 0, done.output
    for name in FILES:
        assert str(folder / name) in done.output
    assert f"pip install --editable '{folder}[test]'" in done.output and "show fresh_idea" in done.output
    return folder


def test_everything_is_filled_in(written: Path) -> None:
    found = sorted(str(path.relative_to(written)) for path in written.rglob("*") if path.is_file())
    assert found == FILES
    for name in FILES:
        assert "$" not in (written / name).read_text(), name


def test_its_tests_pass_as_they_are(written: Path) -> None:
    said = python("-m", "pytest", "-q", "--doctest-modules", "-p", "no:cacheprovider", cwd=written, paths=(written,))
    assert "6 passed" in said


def test_it_installs_as_a_wheel_and_is_found(written: Path, tmp_path: Path) -> None:
    pip = ("-m", "pip", "--disable-pip-version-check")
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels))
    python(*pip, "wheel", *options, str(written), cwd=tmp_path, paths=())
    (wheel,) = wheels.glob("trl_variants_fresh_idea-0.1.0-*.whl")
    python(*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel), cwd=tmp_path, paths=())
    said = python("-m", "trl_variants", "show", "fresh_idea", cwd=tmp_path, paths=(site,))
    assert "tanh" in said and "trl-variants-fresh-idea 0.1.0" in " ".join(said.split())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1st", "'my-1st' is one."),
        ("a/b", "'a-b' is one."),
        ("class", "'my-class' is one."),
        ("grpo", "There is a variant 'grpo' already"),
    ],
)
def test_a_name_that_will_not_do_is_refused_with_one_that_will(name: str, message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new-plugin", name, "--directory", str(tmp_path / "new")])
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = CliRunner().invoke(app, ["new-plugin", "fresh-idea", "--directory", str(tmp_path)])
    assert done.exit_code == 2 and "exists already" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
