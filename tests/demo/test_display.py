"""What a run looks like, on the command line and in a terminal."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import warnings

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from trl_variants import resolve
from trl_variants.cli.demo import demo
from trl_variants.demo import DemoResult, DemoSettings, Evaluation, Sample
from trl_variants.demo.display import Display
from trl_variants.demo.quiet import no_telemetry, quiet

ABOUT = {"model": "tiny (LlamaForCausalLM, 114k parameters)", "task": "reverse strings"}


def shown(act, *, terminal=False):
    """Everything that a display prints while ``act`` uses it."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=100, force_terminal=terminal, highlight=False, markup=False, emoji=False, _environ={}
    )
    display = Display(console)
    act(display)
    display.close()
    return stream.getvalue()


def evaluation(sampled, greedy, completion, right):
    return Evaluation(sampled, greedy, (Sample("abc", "cba", completion, right),))


def test_the_header_names_model_task_variant_and_loss():
    text = shown(lambda display: display.started(DemoSettings(), resolve("dapo"), ABOUT, 10))
    assert "tiny (LlamaForCausalLM, 114k parameters)" in text
    assert "reverse strings" in text
    assert re.search(r"variant\s+dapo", text)
    assert re.search(r"loss\s+ℒ = .*clip", text, re.DOTALL)
    # How many of the groups drawn are kept; those trained on all carry signal.
    assert re.search(r"step +reward +KL +length +clipped +entropy +signal", text)
    masking = resolve("dapo", {"sampling": "mask"})
    text = shown(lambda display: display.started(DemoSettings(), masking, ABOUT, 10))
    assert re.search(r"step +reward +KL +length +clipped +entropy +no signal", text)
    assert "coin" not in text


def test_the_control_experiment_says_what_it_is():
    text = shown(lambda display: display.started(DemoSettings(reward="noise"), resolve("grpo"), ABOUT, 10))
    assert "a coin toss: nothing can be learned" in text


def test_a_line_shows_means_since_the_line_before_and_a_dash_for_what_is_not_logged():
    def act(display):
        display.started(DemoSettings(logging_steps=2), resolve("dapo"), ABOUT, 40)
        logged = [(0.0, 1.0), (0.25, 2.0), (0.5, None), (0.7, float("nan"))]
        for step, (reward, entropy) in enumerate(logged, start=1):
            display.step(step, {"reward": reward, "entropy": entropy, "clip_ratio/region_mean": 0.125})

    lines = [line.split() for line in shown(act).splitlines()[-3:]]
    assert lines == [
        ["1", "0.000", "—", "—", "12.5%", "1.000", "—"],
        ["2", "0.250", "—", "—", "12.5%", "2.000", "—"],
        ["4", "0.600", "—", "—", "12.5%", "—", "—"],
    ]


def test_there_is_a_line_a_step():
    def act(display):
        display.started(DemoSettings(), resolve("dapo"), ABOUT, 200)
        for step in (1, 2, 3):
            display.step(step, {"reward": step / 10})

    assert [line.split()[:2] for line in shown(act).splitlines()[-3:]] == [
        ["1", "0.100"],
        ["2", "0.200"],
        ["3", "0.300"],
    ]


def test_the_end_shows_before_and_after():
    result = DemoResult(
        evaluation(0.0625, 0.25, "abc[/b]", False), evaluation(0.9375, 1.0, "cba", True), (), 11.6, 15.2
    )
    text = shown(lambda display: display.finished(result))
    assert re.search(r"sampled.* 6\.2% .* 93\.8% ", text)
    assert re.search(r"greedy.* 25\.0% .* 100\.0% ", text)
    assert re.search(r"abc .* cba .* ✗ abc\[/b\] .* ✓ cba", text)
    assert "12 s of training, 15 s in all." in text


def test_a_terminal_gets_a_status_and_a_progress_bar_which_go_away_again():
    def act(display):
        display.status("Loading libraries")
        display.started(DemoSettings(), resolve("dapo"), ABOUT, 2)
        display.step(1, {"reward": 0.5})
        display.step(2, {"reward": 0.5})

    text = shown(act, terminal=True)
    assert "Loading libraries ..." in text
    assert "2/2" in text
    assert "Loading libraries" not in shown(act)
    assert "2/2" not in shown(act)


def test_the_command_trains_and_prints():
    app = typer.Typer()
    app.command()(demo)
    result = CliRunner().invoke(
        app, ["--steps", "2", "--variant", "grpo", "--overrides", "{clip_rule: {epsilon_high: 0.55}}"]
    )
    assert result.exit_code == 0, result.output
    assert "1 + 0.55" in " ".join(result.output.split())  # in the loss
    assert len(re.findall(r"^ +\d+( +[\d.%]+){6}$", result.output, re.MULTILINE)) == 2
    assert "Exact answers on held-out questions" in result.output
    assert "--reward" not in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward", "nose"], "--reward must be task or noise, not 'nose'."),
        (["--task-config", "max_terms"], "--task-config must be a mapping, such as '{max_terms: 3}'; not 'max_terms'."),
        (["--task-config", "{"], "--task-config must be a mapping"),
    ],
)
def test_a_wrong_option_is_refused(arguments, message):
    app = typer.Typer()
    app.command()(demo)
    result = CliRunner().invoke(app, arguments)
    assert message in str(result.exception)


def test_a_run_prints_nothing_but_the_demo_and_connects_to_nothing():
    code = (
        "import socket, sys\n"
        "def refuse(*arguments):\n"
        "    print('CONNECTED', arguments, file=sys.stderr)\n"
        "    raise OSError('no network')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse\n"
        "from trl_variants.demo import DemoSettings, run_demo\n"
        "run_demo(DemoSettings(steps=1))\n"
        "import time; time.sleep(0.5)\n"  # telemetry is sent by a thread
    )
    hidden = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "CI", "TRANSFORMERS_VERBOSITY")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_errors_are_still_shown_and_what_was_shown_before_is_shown_afterwards(caplog):
    logger = logging.getLogger("trl")
    before = logger.level
    with quiet(), warnings.catch_warnings(record=True) as caught:
        logging.getLogger("trl.trainer").warning("advice")
        logging.getLogger("trl.trainer").error("failure")
        warnings.warn("more advice", stacklevel=1)
    assert [record.message for record in caplog.records] == ["failure"]
    assert caught == []
    assert logger.level == before
    with pytest.warns(UserWarning, match="again"):
        warnings.warn("again", stacklevel=1)


def test_telemetry_is_off_even_when_the_hub_library_was_imported_before(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
    no_telemetry()
    assert constants.HF_HUB_DISABLE_TELEMETRY is True
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
