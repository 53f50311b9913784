"""Rewards of other libraries: both kinds of completions, what counts as right, and what is refused."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import pytest
import trl_variants_rewards
from reasoning_gym.factory import DATASETS
from trl_variants_rewards import math_verify, reasoning_gym

from trl_variants import VariantError, load_registry
from trl_variants.testing import check_reward_function, train_config
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
        # A true answer without $ is read whole, not up to its first number.
        (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", 1.0),
        (r"\boxed{2}", r"2\sqrt{3}", 0.0),
        (r"\boxed{3}", "3x", 0.0),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{3}", r"\left( 3, \frac{\pi}{2} \right)", 0.0),
        (r"\boxed{2, 1}", r"\{1, 2\}", 1.0),
        (r"\boxed{12}", "12 cm", 1.0),
        (r"\boxed{C}", r"\text{(C)}", 1.0),
        ("72.0", 72, 1.0),
        # Prose, or a text with its mathematics marked, is read as the library reads it.
        ("It is 72.", "The answer is 72", 1.0),
        (r"\boxed{72}", r"The sum is $7 \cdot 10 = 70$, plus 2 is $\boxed{72}$.", 1.0),
        # 1/3 to 6 decimal places.
        ("It is 0.333333.", r"\frac{1}{3}", 1.0),
        ("It is 0.333.", r"\frac{1}{3}", 0.0),
        # Where in a completion the answer stands.
        (r"So \boxed{3} at first." + "\n\n" + r"Then \boxed{72}.", "72", 1.0),
        (r"The answer is $3$, since \boxed{72}", "72", 1.0),
        (r"<think>\boxed{3}?</think> The answer is $72$.", "72", 1.0),
        (r"<think>\boxed{72}?</think> The answer is $3$.", "72", 0.0),
        ("<answer>72</answer>", "72", 1.0),
        ("72 or <answer>(1, 2)</answer>", "(1, 2)", 1.0),
        ("72 <answer></answer>", "72", 0.0),
        ("", "72", 0.0),
        ("72", None, None),
        ("72", "", None),
    ],
)
def test_answers_are_compared_as_mathematics(text: str, true: Any, reward: float | None) -> None:
    assert math_verify([text], solution=[true]) == [reward]
    assert math_verify([said(text)], answer=[true]) == [reward]


def test_each_true_answer_is_that_of_its_row_and_what_was_read_is_logged() -> None:
    logged: dict[str, list[str]] = {}
    rewards = math_verify(["1", "no", "2"], answer=["1", "1", None], log_extra=logged.__setitem__)
    assert rewards == [1.0, 0.0, None]
    assert logged == {
        "math_verify_true": ["[1, '1']", "[1, '1']", "unreadable"],
        "math_verify_read": ["[1, '1']", "unreadable", "[2, '2']"],
    }


def test_it_scores_outside_of_the_main_thread_where_the_library_has_no_timeouts() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math_verify, [r"\boxed{72}", "71"], answer=["72", "72"]).result() == [1.0, 0.0]


def test_both_keep_what_trl_asks_of_a_reward_function() -> None:
    assert check_reward_function(math_verify, ["72", "no"], solution=["72", None]) == [1.0, None]
    row = {"answer": ["cat"], "metadata": [json.dumps({"source_dataset": "letter_jumble"})]}
    assert check_reward_function(reasoning_gym, ["<answer>cat</answer>"], **row) == [1.0]


def test_a_message_may_be_in_parts() -> None:
    parts = [[{"role": "assistant", "content": [{"type": "text", "text": "7"}, {"type": "text", "text": "2"}]}]]
    assert math_verify([*parts, [{"role": "assistant", "content": None}], []], answer=["72"] * 3) == [1.0, 0.0, 0.0]


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


#: Answers that are none of most tasks, on some of which some scorers fail.
JUNK = ("", "no such thing", "12", "{}", "[[1]]", '{"a": 1}', "-1/0", "a b\nc")


@pytest.mark.filterwarnings("ignore:loadtxt")
def test_every_task_grades_its_own_answer_from_a_stored_row_and_survives_any_other() -> None:
    import reasoning_gym as library

    for task in sorted({*DATASETS} - {"composite"}):
        with contextlib.redirect_stdout(io.StringIO()):
            entry = library.create_dataset(task, size=1, seed=1)[0]
        true, stored = entry["answer"], json.dumps(entry["metadata"])
        if task == "graph_color":  # one of many right answers
            true = json.dumps(entry["metadata"]["possible_answer"])
        rows = {"answer": [entry["answer"]] * (1 + len(JUNK)), "metadata": [stored] * (1 + len(JUNK))}
        scores = reasoning_gym([true or "none", *JUNK], **rows)
        assert scores[0] == 1 or true is None, task
        assert all(0 <= score <= 1 for score in scores), (task, scores)


def test_the_dataset_of_the_readme_is_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = (CONFIGS.parent / "plugins/trl-variants-rewards/README.md").read_text().split("```python\n")[1]
    exec(block.partition("```")[0].replace("size=1000", "size=4"), {})
    (rows,) = datasets.load_dataset("data", cache_dir=str(tmp_path / "cache")).values()
    columns = {name: rows[name][:] for name in ("answer", "metadata")}
    assert "<answer>" in rows["prompt"][0][0]["content"] and len(rows) == 4
    assert reasoning_gym([f"<answer>{true}</answer>" for true in columns["answer"]], **columns) == [1.0] * 4


def test_a_row_that_is_no_entry_of_its_task_is_an_error_and_not_a_zero() -> None:
    row = {"answer": ["5"], "metadata": [{"source_dataset": "mini_sudoku"}]}  # without its solution
    for text in ("5", "6"):
        with pytest.raises(VariantError, match="the scorer of mini_sudoku fails on the true answer of a row"):
            reasoning_gym([text], **row)


def test_they_are_named_in_a_config_and_train(tmp_path: Path) -> None:
    registry = load_registry("none", extra=["trl_variants_rewards"])
    assert {*registry.reward_functions} == {"math_verify", "reasoning_gym"}
    line = ["--config", str(CONFIGS / "grpo.yaml"), "--variant_plugins", "trl_variants_rewards"]
    job = parse([*line, "--reward_funcs", "math_verify", "think_format_reward"], anywhere=True)
    assert [function.__name__ for function in job.reward_funcs] == ["math_verify", "think_format_reward"]
    rows = [{"prompt": "w1 w2", "answer": "w3", "metadata": {"source_dataset": "letter_jumble"}}] * 8
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = train_config(
        CONFIGS / "grpo.yaml",
        tmp_path,
        plugins=["trl_variants_rewards"],
        reward_funcs=["math_verify", "reasoning_gym"],
        dataset_name=str(tmp_path / "rows"),
        steps=1,
    )
    assert {"rewards/math_verify/mean", "rewards/reasoning_gym/mean"} <= log[0].keys()
    said = {entry["name"]: entry for entry in json.loads((tmp_path / "out" / "variant.json").read_text())["rewards"]}
    assert said["reasoning_gym"]["packages"] == {"reasoning-gym": metadata.version("reasoning-gym")}
    assert said["math_verify"]["function"] == "trl_variants_rewards.mathematics.math_verify"


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
