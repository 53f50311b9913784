"""The verbs that read: what holds for each of them in every form of output, and what they import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trl_variants
from tests.cli.reading import HERE, VERBS, error, out, run
from trl_variants.cli.main import app

FORMS = ([], ["--json"], ["--markdown"])

pytestmark = pytest.mark.usefixtures("builtins_only")


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_output_that_is_no_terminal_has_no_escape_codes_and_no_blanks_at_line_ends(
    verb: list[str], form: list[str]
) -> None:
    text = out(*verb, *form)
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.split("\n"))


@pytest.mark.parametrize("columns", [30, 57])
@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_text_keeps_to_the_width_and_cuts_nothing_off(verb: list[str], columns: int) -> None:
    narrow, usual = out(*verb, columns=columns), out(*verb, columns=80)
    assert max(map(len, narrow.split("\n"))) <= columns
    characters = [Counter(re.sub(r"[\s─]", "", text)) for text in (narrow, usual)]
    assert characters[0] == characters[1]


@pytest.mark.parametrize("form", ["--json", "--markdown"])
@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_json_and_markdown_do_not_depend_on_the_width(verb: list[str], form: str) -> None:
    assert out(*verb, form, columns=20) == out(*verb, form, columns=300)


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_a_terminal_gets_bold(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[1" in CliRunner().invoke(app, verb, color=True).stdout


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_two_forms_at_once_are_refused(verb: list[str]) -> None:
    message = "Error: --json and --markdown are two forms of the same; choose one."
    assert error(*verb, "--json", "--markdown") == message


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_a_plugin_that_cannot_be_loaded_is_one_line(verb: list[str], tmp_path: Path) -> None:
    missing, broken = tmp_path / "none.py", tmp_path / "broken.py"
    broken.write_text("1 / 0")
    assert error(*verb, "--plugins", str(missing)) == f"Error: There is no plugin file {missing}."
    assert error(*verb, "--plugins", str(broken)) == (
        f"Error: The plugin '{broken}' could not be loaded: ZeroDivisionError('division by zero')"
    )


def test_a_traceback_is_shown_when_asked_for(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    result = CliRunner().invoke(app, ["--traceback", "list", "--plugins", str(broken)])
    assert result.exit_code == 1
    assert isinstance(result.exception, trl_variants.VariantError)
    assert isinstance(result.exception.__cause__, ZeroDivisionError)


def test_an_installed_plugin_that_is_broken_is_a_warning_and_the_rest_works(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, dist = "theirs", None

        def load(self) -> object:
            raise ImportError("no such thing")

    monkeypatch.setenv("TRL_VARIANTS_PLUGINS", "auto")
    monkeypatch.setattr("trl_variants.discovery.metadata.entry_points", lambda group: [Point()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once, and not as a warning of Python's besides
        result = run("list", "--slot", "variant")
    assert result.stderr == "Warning: the plugin of theirs could not be loaded: ImportError('no such thing')\n"
    assert "dapo" in result.stdout


# -- the program -----------------------------------------------------------------------------------


def test_version() -> None:
    assert out("--version") == HERE + "\n"


def test_without_a_verb_the_help_names_all_of_them() -> None:
    help_text = run(code=2).output
    assert all(re.search(rf"\b{verb}\b", help_text) for verb in ("list", "show", "diff", "table"))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, encoding="utf-8", check=True
    )


def test_the_reading_verbs_import_neither_trl_nor_transformers() -> None:
    code = f"""
import sys
from trl_variants.cli.main import app
for arguments in {[*VERBS, ["list", "--json"]]}:
    app(arguments, standalone_mode=False)
print([name for name in ("trl", "transformers", "accelerate", "datasets", "torch") if name in sys.modules])
"""
    assert python("-c", code).stdout.split("\n")[-2] == "['torch']"


def test_version_does_not_wait_for_torch_and_the_package_runs_as_a_module() -> None:
    result = python("-X", "importtime", "-m", "trl_variants", "--version")
    assert result.stdout == HERE + "\n"
    assert re.search(r"\btyper\b", result.stderr) and not re.search(r"\btorch\b", result.stderr)


def test_a_stream_that_cannot_hold_greek_gets_question_marks_and_valid_json() -> None:
    runner = CliRunner(charset="latin-1")
    text = runner.invoke(app, ["show", "grpo"], catch_exceptions=False).stdout
    assert re.search(r"^  \?    = 0\.04$", text, re.MULTILINE)
    whole = json.loads(runner.invoke(app, ["show", "grpo", "--json"], catch_exceptions=False).stdout)
    assert whole["objective"]["text"][-1] == "β = 0.04"
