"""``trl-variants new-plugin``: what it writes is a distribution whose tests pass as it is."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

from trl_variants import __version__, load_registry
from trl_variants.cli.main import app
from trl_variants.testing import check_plugin
from trl_variants.trainer.launch import parse

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
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=written, paths=())
    assert "6 passed" in said  # five tests and the doctest


def test_what_is_written_is_formatted(written: Path) -> None:
    for verb in (["check", "--select=E,F,I,UP,B"], ["format", "--check"]):
        python("-m", "ruff", *verb, "--no-cache", "--config=line-length=120", ".", cwd=written, paths=())


def test_the_kit_holds_the_module_to_the_contract(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(written)
    verdicts = check_plugin(importlib.import_module("trl_variants_fresh_idea"))
    assert list(verdicts) == ["clip_rule.fresh_idea_clip", "variant.fresh_idea"]
    assert not any(verdict.exceptions for verdict in verdicts.values())


def test_a_clip_acts_in_the_config(written: Path) -> None:
    job = parse(
        ["--config", str(written / "configs/fresh_idea.yaml"), "--use_cpu", "true", "--bf16", "false"]
        + ["--variant_plugins", str(written / "trl_variants_fresh_idea.py")],
        anywhere=True,
    )
    assert job.training.steps_per_generation == 2 * job.training.gradient_accumulation_steps


def test_it_requires_the_versions_that_it_was_written_for(written: Path) -> None:
    series = ".".join(__version__.split(".")[:2])
    assert f'dependencies = ["trl-variants>={series},<' in (written / "pyproject.toml").read_text()


def test_it_installs_as_a_wheel_and_is_found(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = ("-m", "pip", "--disable-pip-version-check")
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels))
    python(*pip, "wheel", *options, str(written), cwd=tmp_path, paths=())
    (wheel,) = wheels.glob("trl_variants_fresh_idea-0.1.0-*.whl")
    python(*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel), cwd=tmp_path, paths=())
    said = python("-m", "trl_variants", "show", "fresh_idea", cwd=tmp_path, paths=(site,))
    assert "tanh" in said and "trl-variants-fresh-idea 0.1.0" in " ".join(said.split())
    listed = python("-m", "trl_variants", "list", "--json", cwd=tmp_path, paths=(site,))
    (rule,) = (entry for entry in json.loads(listed)["clip_rule"] if entry["name"] == "fresh_idea_clip")
    assert rule["distribution"] == "trl-variants-fresh-idea" and rule["parameters"]["width"]["default"] == 0.2

    monkeypatch.syspath_prepend(site)
    monkeypatch.delenv("TRL_VARIANTS_PLUGINS", raising=False)
    assert str(load_registry().owner("variant", "fresh_idea")) == "trl-variants-fresh-idea 0.1.0"
    done = CliRunner().invoke(app, ["new-plugin", "fresh-idea", "--directory", str(tmp_path / "again")])
    assert done.exit_code == 2 and not (tmp_path / "again").exists()
    assert done.stderr == (
        "Error: The plugin 'fresh_idea' of trl-variants-fresh-idea 0.1.0 is installed already. 'my-fresh-idea' is "
        "another name.\n"
    )


def test_the_templates_are_in_the_wheel_of_the_core() -> None:
    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trl_variants" / "templates").iterdir()}
    assert len(templates) == len(FILES) and templates <= packed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1st", "'my-1st' is one."),
        ("a/b", "'a-b' is one."),
        ("class", "'my-class' is one."),
        ("..", "'my' is one."),
        ("trl-variants", "'my' is one."),
        ("grpo", "'grpo' is a name of trl-variants"),
        ("sapo", "'sapo' is a name of trl-variants-soft already"),
        ("soft", "trl-variants-soft is a plugin of this project. 'my-soft' is another name."),
        ("dual", "the plugin's clip_rule would have it. 'my-dual' is"),
    ],
)
def test_a_name_that_will_not_do_is_refused_with_one_that_will(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_VARIANTS_PLUGINS", "none")
    done = CliRunner().invoke(app, ["new-plugin", name, "--directory", str(tmp_path / "new")])
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = CliRunner().invoke(app, ["new-plugin", "fresh-idea", "--directory", str(tmp_path)])
    assert done.exit_code == 2 and "exists already" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("place", "message"), [("file", "exists already"), ("file/in", "cannot be written into")])
def test_a_place_that_will_not_do_is_one_message(place: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = CliRunner().invoke(app, ["new-plugin", "fresh-idea", "--directory", str(tmp_path / place)])
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"
