"""Every example runs, and the one-file component trains from a YAML that names it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from trl_variants.trainer.launch import parse, run

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_script(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_has_a_test_here() -> None:
    tested = Path(__file__).read_text()
    assert all(f'"{path.name}"' in tested for path in EXAMPLES.glob("*.py"))


def test_the_training_script_trains_and_saves(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = tiny.llama_folder(tmp_path / "model"), tmp_path / "out"
    options = ["--model", model, "--output-dir", str(out), "--steps", "2", "--max-completion-length", "6", "--cpu"]
    run_script("train.py", monkeypatch, *options)
    assert (out / "model.safetensors").is_file()
    assert '"entropy_bonus"' in (out / "variant.json").read_text()


def test_the_one_file_component_trains_from_a_yaml_that_names_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(
        f"""
variant: smooth_dapo
variant_plugins: [{EXAMPLES / "inline_component.py"}]
variant_overrides: {{clip_rule: {{width: 1e-1}}, reward_shaper: none}}
model_name_or_path: {tiny.llama_folder(tmp_path / "model")}
dataset_name: {tiny.dataset_folder(tmp_path)}
reward_funcs: [tests.tiny.low_words]
output_dir: {tmp_path / "out"}
learning_rate: 1e-3
use_cpu: true
bf16: false
report_to: none
max_steps: 2
max_completion_length: 6
"""
    )
    job = parse(["--config", str(config)])
    assert str(job.training.recipe.clip_rule) == "smooth_clip(width=0.1)"
    assert job.training.learning_rate == 1e-3
    run(job)
    assert '"smooth_clip"' in (tmp_path / "out" / "variant.json").read_text()


def test_the_one_file_component_is_also_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trl_variants import demo

    def short(settings: demo.DemoSettings) -> demo.DemoResult:
        return run_demo(demo.DemoSettings(variant=settings.variant, plugins=settings.plugins, steps=2))

    run_demo = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", short)
    run_script("inline_component.py", monkeypatch)
    assert "greedy accuracy" in capsys.readouterr().out


def test_comparing_variants_prints_one_row_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script("compare_variants.py", monkeypatch, "grpo", "reinforce", "--steps", "2")
    printed = capsys.readouterr().out
    assert "held-out accuracy" in printed and " grpo " in printed and " reinforce " in printed
