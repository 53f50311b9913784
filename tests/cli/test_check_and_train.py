"""`check` and `train`: what is wrong is said in one message, before a model is loaded."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests import tiny
from trl_variants.cli.main import app

GOOD: dict[str, Any] = {
    "variant": "grpo",
    "model_name_or_path": "some/model",
    "dataset_name": "some/data",
    "reward_funcs": ["tests.tiny.low_words"],
    "output_dir": "out",
    "num_generations": 4,
    "per_device_train_batch_size": 4,
}


@pytest.fixture
def check(tmp_path: Path) -> Any:
    """Write a config with some keys changed (None takes one away), and check it."""

    def run(*options: str, **changes: Any) -> Any:
        values = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(values).replace("'1e-6'", "1e-6"))
        return CliRunner().invoke(app, ["check", str(tmp_path / "c.yaml"), *options])

    return run


def test_a_sound_config_is_described(check: Any) -> None:
    result = check(variant_overrides={"kl": {"coef": "1e-6"}}, gradient_accumulation_steps=2, num_iterations=3)
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "rollout 2 prompts x 4 completions, at most 512 tokens each" in text
    assert "updates 3 optimizer step(s) per rollout" in text
    assert "resident policy (trained), reference (frozen)" in text
    assert "clip_rule: ppo_clip(epsilon_low=0.2, epsilon_high=0.2)" in text


def test_a_model_as_a_reward_is_resident(check: Any) -> None:
    assert "reward model (frozen)" in check(reward_funcs=["some/reward-model"]).stdout


OVERRIDDEN = "loss_type is set in the config, but the variant decides it. "
ERRORS = [
    ({"learning_rat": 1}, "c.yaml has an unknown key 'learning_rat'. Did you mean 'learning_rate'?"),
    (
        {"clip_rule": "cispo"},
        "c.yaml has an unknown key 'clip_rule'. Put it under variant_overrides: {clip_rule: ...}.",
    ),
    ({"loss_type": "dapo"}, OVERRIDDEN + "Use variant_overrides: {loss_aggregator: ...}."),
    (
        {"variant_overrides": {"clip_rule": {"epsilon_hi": 0.3}}},
        "clip_rule 'ppo_clip' has no parameter 'epsilon_hi'. Did you mean 'epsilon_high'?",
    ),
    (
        {"num_generations": 1},
        "advantage_estimator 'group_mean' needs at least 2 generations per prompt; num_generations is 1.",
    ),
    ({"num_generations": "four"}, "argument --num_generations/--num-generations: invalid int value: 'four'"),
    ({"learning_rate": True}, "argument --learning_rate/--learning-rate: invalid float value: 'True'"),
    ({"use_cpu": 7}, "argument --use_cpu/--use-cpu: Truthy value expected: got 7"),
    (
        {"beta": 0.1, "scale_rewards": "group"},
        "beta is set in the config, but the variant decides it. Use variant_overrides: {kl: {coef: ...}}.\n"
        "scale_rewards is set in the config, but the variant decides it. "
        "Use variant_overrides: {advantage_normalizer: ...}.",
    ),
    ({"model_name_or_path": None}, "No model: set model_name_or_path."),
    ({"dataset_name": None}, "No dataset: set dataset_name or datasets."),
    ({"datasets": [{"path": "json"}]}, "Both dataset_name and datasets are set; keep one."),
    ({"model_name_or_path": "./nowhere"}, "model_name_or_path: there is no folder ./nowhere."),
    (
        {"reward_funcs": ["tests.tiny.lo_words"]},
        "The reward function 'tests.tiny.lo_words' cannot be imported: module 'tests.tiny' has no attribute 'lo_words'",
    ),
    ({"reward_funcs": ["tests.tiny.WORDS"]}, "The reward function 'tests.tiny.WORDS' is not callable."),
    ({"variant_plugins": ["nowhere.py"]}, "There is no plugin file nowhere.py."),
    ({"auto_find_batch_size": True}, "auto_find_batch_size is not supported by GRPO"),
    (
        {"variant": "dapo", "max_completion_length": 100, "variant_overrides": {"reward_shaper": {"cache": 200}}},
        "reward_shaper 'soft_overlong' (trl-variants 0.1.0) failed: "
        "cache (200) must not be larger than the length limit (100)",
    ),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_one_message_and_exit_code_2(check: Any, changes: dict[str, Any], message: str) -> None:
    result = check(**changes)
    assert result.exit_code == 2, result.stdout
    assert message in result.stderr
    assert result.stderr.startswith("Error: ") and "Traceback" not in result.stderr and not result.stdout


def test_no_reward_and_a_misspelt_one_list_the_names(check: Any) -> None:
    names = "accuracy_reward, reasoning_accuracy_reward, think_format_reward"
    assert check(reward_funcs=None).stderr == (
        "Error: No reward: set reward_funcs to names or dotted paths, or reward_model_name_or_path to a model. "
        f"Names: {names}.\n"
    )
    assert check(reward_funcs=["acuracy_reward"]).stderr.startswith(
        "Error: No reward function named 'acuracy_reward'. Did you mean 'accuracy_reward'? "
        f"Registered: accuracy_reward (trl {version('trl')}), "
    )


def test_options_win_over_the_file_and_misspelt_ones_are_refused(check: Any) -> None:
    result = check("--num_generations", "2", "--variant_overrides", '{"kl": "none"}')
    assert result.exit_code == 0, result.stderr
    assert "4 prompts x 2 completions" in result.stdout or "x 2 completions" in result.stdout
    assert "reference" not in result.stdout
    assert (
        check("--learning_rte", "1").stderr
        == "Error: There is no option '--learning_rte'. Did you mean 'learning_rate'?\n"
    )
    assert "has no key 'clip'" in check("--variant_overrides", "{clip: cispo}").stderr


def test_one_reward_where_a_list_is_due_is_a_list_of_one(check: Any) -> None:
    assert "rewards     tests.tiny.low_words" in check(reward_funcs="tests.tiny.low_words").stdout


def test_a_reward_is_shown_with_where_it_comes_from(check: Any) -> None:
    shown = " ".join(check(reward_funcs=["think_format_reward", "tests.tiny.low_words", "some/model"]).stdout.split())
    assert f"rewards think_format_reward (trl {version('trl')}) tests.tiny.low_words some/model rollout" in shown


def test_train_without_anything_says_what_to_give() -> None:
    assert CliRunner().invoke(app, ["train"]).stderr == "Error: No config: give --config FILE.yaml.\n"


def test_a_key_that_is_set_twice_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("variant: grpo\nmax_steps: 1\nmax_steps: 2\n")
    said = CliRunner().invoke(app, ["check", str(tmp_path / "c.yaml")]).stderr
    assert "c.yaml is not valid YAML: 'max_steps' is set twice" in said and "line 2, column 1" in said


def test_a_dataset_that_cannot_be_loaded_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**GOOD, "dataset_name": "nosuchdata", "use_cpu": True}))
    result = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "c.yaml")])
    assert result.exit_code == 2 and "Error: Could not load the dataset: " in result.stderr


@pytest.mark.parametrize("text", ["- a", "a: [", "just words"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    result = CliRunner().invoke(app, ["check", str(tmp_path / "c.yaml")])
    assert result.exit_code == 2
    assert "must hold a mapping" in result.stderr or "is not valid YAML" in result.stderr
    assert "There is no config file" in CliRunner().invoke(app, ["check", "nowhere.yaml"]).stderr


def test_train_trains_and_writes_the_recipe_and_the_model(tmp_path: Path) -> None:
    model, data = tiny.llama_folder(tmp_path / "model"), tiny.dataset_folder(tmp_path)
    places = {"model_name_or_path": model, "dataset_name": data}
    (tmp_path / "c.yaml").write_text(
        yaml.safe_dump({**GOOD, **places, "output_dir": str(tmp_path / "out")})
        + "learning_rate: 1e-3\nuse_peft: true\nlora_target_modules: [q_proj, v_proj]\n"
    )
    line = ["train", "--config", str(tmp_path / "c.yaml"), "--max_steps", "2"]
    line += ["--use_cpu", "true", "--bf16", "false"]
    line += ["--report_to", "none", "--max_completion_length", "6", "--eval_strategy", "steps", "--eval_steps", "1"]
    result = CliRunner().invoke(app, [*line, "--per_device_eval_batch_size", "4", "--num_generations_eval", "1"])
    assert result.exit_code == 0, (result.stderr, result.exception)
    recipe = json.loads((tmp_path / "out" / "variant.json").read_text())
    assert recipe["variant"] == "grpo"
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_a_split_that_is_not_there_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    data = tiny.dataset_folder(tmp_path)
    (tmp_path / "c.yaml").write_text(
        yaml.safe_dump({**GOOD, "dataset_name": data, "dataset_train_split": "trian", "use_cpu": True})
    )
    result = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "c.yaml")])
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "Error: The dataset has no split 'trian'. Did you mean 'train'? It has: train, test.\n"
    )


def test_plugins_of_the_line_stand_beside_those_of_the_file(tmp_path: Path) -> None:
    source = "from trl_variants import Variant, hookimpl\n@hookimpl\ndef register_variants():\n    return [{}]\n"
    for name, parent in (("first", "dr_grpo"), ("second", "first")):
        (tmp_path / f"{name}.py").write_text(source.format(f'Variant(name="{name}", extends="{parent}")'))
    (tmp_path / "config.yaml").write_text(
        f"variant: second\nvariant_plugins: [{tmp_path / 'first.py'}]\nmodel_name_or_path: m\ndataset_name: d\n"
        "reward_funcs: [accuracy_reward]\n"
    )
    line = ["check", str(tmp_path / "config.yaml"), "--plugins", str(tmp_path / "second.py")]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0 and "second" in done.output
    assert CliRunner().invoke(app, line[:2]).exit_code == 2
    assert CliRunner().invoke(app, [*line, "--variant_plugins", str(tmp_path / "first.py")]).exit_code == 0
