"""Rewards of other libraries: both kinds of completions, what counts as right, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import trl_variants_rewards
from trl_variants_rewards import math_verify, reasoning_gym

from trl_variants import VariantError, load_registry
from trl_variants.testing import train_config
from trl_variants.trainer.launch import parse

CONFIGS = Path(__file__).parents[3] / "configs"


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "true", "reward"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"So it is \boxed{\frac{1}{2}}.", r"\frac{2}{4}", 1.0),
        (r"So it is \boxed{\frac{1}{2}}.", "1/3", 0.0),
        ("The answer is 72.", "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72", 1.0),
        ("The answer is 71.", "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72", 0.0),
        (r"$\boxed{x^2 + 2x + 1}$", "$(x+1)^2$", 1.0),
        ("I do not know.", "72", 0.0),
        ("72", None, None),
        ("72", "", None),
    ],
)
def test_answers_are_compared_as_mathematics(text: str, true: Any, reward: float | None) -> None:
    assert math_verify([text], solution=[true]) == [reward]
    assert math_verify([said(text)], answer=[true]) == [reward]


def test_a_dataset_without_true_answers_is_told() -> None:
    with pytest.raises(VariantError, match="'math_verify' needs the true answers: a column solution or answer"):
        math_verify(["1"])
    with pytest.raises(VariantError, match="'reasoning_gym' needs the columns answer and metadata"):
        reasoning_gym(["1"], answer=["1"])
    with pytest.raises(VariantError, match="metadata has no source_dataset"):
        reasoning_gym(["1"], answer=["1"], metadata=[{}])
    with pytest.raises(VariantError, match="no_such_task"):
        reasoning_gym(["1"], answer=["1"], metadata=[{"source_dataset": "no_such_task"}])


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "word_ladder"])
def test_a_task_scores_an_answer_as_it_does_itself(task: str) -> None:
    import reasoning_gym as library

    made = library.create_dataset(task, size=3, seed=1)
    for entry in made:
        columns = {"answer": [entry["answer"]] * 3, "metadata": [entry["metadata"], json.dumps(entry["metadata"])] * 2}
        columns["metadata"] = columns["metadata"][:3]
        right, wrong = entry["answer"], "no such thing"
        got = reasoning_gym([f"<answer>{wrong}</answer> or <answer> {right} </answer>", said(right), wrong], **columns)
        assert got == [made.score_answer(right, entry)] * 2 + [made.score_answer(wrong, entry)]


def test_they_are_named_in_a_config_and_train(tmp_path: Path) -> None:
    registry = load_registry("none", extra=["trl_variants_rewards"])
    assert {*registry.reward_functions} == {"math_verify", "reasoning_gym"}
    line = ["--config", str(CONFIGS / "grpo.yaml"), "--variant_plugins", "trl_variants_rewards"]
    job = parse([*line, "--reward_funcs", "math_verify", "think_format_reward"], anywhere=True)
    assert [function.__name__ for function in job.reward_funcs] == ["math_verify", "think_format_reward"]
    log = train_config(
        CONFIGS / "grpo.yaml", tmp_path, plugins=["trl_variants_rewards"], reward_funcs=["tests.tiny.length"], steps=1
    )
    assert len(log) == 1


def test_a_library_that_is_missing_is_told_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "math_verify" else find(name, *a))
    line = ["--config", str(CONFIGS / "grpo.yaml"), "--use_cpu", "true", "--bf16", "false"]
    for name in ("math_verify", "accuracy_reward"):
        options = ["--reward_funcs", name, "--variant_plugins", "trl_variants_rewards"]
        with pytest.raises(VariantError, match=f"reward function '{name}' needs math-verify: pip install math-verify"):
            parse([*line, *options])
        assert parse([*line, *options], anywhere=True).reward_funcs  # a check does without
    assert trl_variants_rewards.math_verify.requires == {"math_verify": "math-verify"}
