"""Running the verbs that read, and reading what they print."""

from __future__ import annotations

import json
import re
from typing import Any

from typer.testing import CliRunner

import trl_variants
from trl_variants.cli.main import app
from trl_variants.registry import load_registry

REGISTRY = load_registry("none")
HERE = "trl-variants " + trl_variants.__version__
VERBS = (["list"], ["show", "dapo"], ["diff", "grpo", "dapo"], ["table"])

PLUGIN = '''
"""A plugin in one file."""

from trl_variants import ClipResult, Variant, component, hookimpl


@component(paper="https://example.org/a/long/address/of/a/paper")
def soft_clip(log_ratio, advantages, *, tau: float = 0.5):
    """A soft clip | with a bar."""
    return ClipResult(loss=-advantages * (log_ratio.exp() / tau).tanh())


def length_reward(completions, **kwargs):
    """Longer is better."""
    return [float(len(completion)) for completion in completions]


@hookimpl
def register_clip_rules():
    return [soft_clip]


@hookimpl
def register_reward_functions():
    return [length_reward]


@hookimpl
def register_variants():
    return [Variant(name="soft", extends="dapo", clip_rule="soft_clip", summary="Soft.", num_generations=16)]
'''


def run(*arguments: str, columns: int = 80, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    assert result.exit_code == code, result.output
    return result


def out(*arguments: str, columns: int = 80) -> str:
    text: str = run(*arguments, columns=columns).stdout
    return text


def data(*arguments: str) -> Any:
    return json.loads(out(*arguments, "--json"))


def error(*arguments: str) -> str:
    """The one line that a mistake prints on stderr; nothing is printed on stdout."""
    result = run(*arguments, code=2)
    assert result.stdout == ""
    message: str = result.stderr
    assert message.count("\n") == 1 and "Traceback" not in message
    return message.removesuffix("\n")


def table_of(markdown: str) -> list[list[str]]:
    """The cells of the first Markdown table; each row has as many as the header."""
    lines = [line for line in markdown.split("\n") if line.startswith("|")]
    rows = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in lines]
    assert set(rows[1]) == {"---"}
    return [rows[0], *rows[2:]]
