"""A run made again from its ``variant.json`` alone: the recipe, and with `trl-variants train` the whole run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trl import ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from tests.components.common import close
from trl_variants import Advantages, ClipResult, VariantError, component, load_registry, resolve, use
from trl_variants.components.clip_rules import ppo_clip
from trl_variants.describe import recipe_dict
from trl_variants.testing import make_rollout, train_config
from trl_variants.trainer.config import VariantConfig
from trl_variants.trainer.launch import _given, parse, run

REGISTRY = load_registry("none")
CONFIGS = Path(__file__).parent.parent / "configs"
PLUGIN = """
from trl_variants import component, hookimpl

@component
def shifted(rewards, scored, *, by: float = 0.5):
    return (rewards - by) * scored

@hookimpl
def register_advantage_estimators():
    return [shifted]
"""


@component
def halved(log_ratio: Any, advantages: Any, *, factor: float = 0.5) -> ClipResult:
    return ClipResult(loss=-factor * log_ratio.exp() * advantages)


def written(recipe: Any, folder: Path) -> str:
    path = folder / "variant.json"
    path.write_text(json.dumps(recipe_dict(recipe)))
    return str(path)


@pytest.mark.parametrize("name", REGISTRY.variants)
def test_every_variant_is_rebuilt_as_it_was(name: str, tmp_path: Path) -> None:
    recipe = resolve(name, registry=REGISTRY)
    again = resolve(written(recipe, tmp_path), registry=REGISTRY)
    assert recipe_dict(again) == recipe_dict(recipe)


def test_overrides_are_in_the_file_and_go_on_from_it(tmp_path: Path) -> None:
    overrides = {"clip_rule": {"epsilon_high": 0.3}, "kl": {"estimator": "k2", "controller": "adaptive"}}
    path = written(resolve("grpo", overrides, REGISTRY), tmp_path)
    again = resolve(path, {"clip_rule": {"epsilon_low": 0.1}}, REGISTRY)
    assert (again.clip_rule.parameters["epsilon_low"], again.clip_rule.parameters["epsilon_high"]) == (0.1, 0.3)
    assert again.kl and (again.kl.estimator.name, again.kl.controller.name) == ("k2", "adaptive")


def test_defaults_that_have_changed_since_do_not_change_the_recipe(tmp_path: Path) -> None:
    said = recipe_dict(resolve("grpo", registry=REGISTRY))
    said["slots"]["advantage_normalizer"][0]["parameters"]["eps"] = 0.25
    said["settings"]["num_iterations"] = 7
    (tmp_path / "variant.json").write_text(json.dumps(said))
    again = resolve(str(tmp_path / "variant.json"), registry=REGISTRY)
    assert again.advantage_normalizers[0].parameters["eps"] == 0.25 and again.variant.num_iterations == 7


def test_a_plugin_file_that_was_loaded_besides_is_loaded_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    registry = load_registry("none", extra=[str(tmp_path / "mine.py")])
    overrides = {"advantage_estimator": {"name": "shifted", "by": 0.25}, "advantage_normalizer": "none"}
    path = written(resolve("grpo", overrides, registry), tmp_path)
    again = resolve(path, registry=load_registry("none"))
    close(again.advantages(make_rollout([1.0, 0.0])).advantages, [0.75, -0.25])
    (tmp_path / "mine.py").unlink()
    sys.modules.pop(next(name for name in sys.modules if name.startswith("trl_variants_plugin_mine_")))
    with pytest.raises(VariantError, match="There is no plugin file .*mine.py"):
        resolve(path, registry=load_registry("none"))


def test_a_function_that_was_given_itself_is_found_where_it_is(tmp_path: Path) -> None:
    path = written(resolve("grpo", {"clip_rule": use(halved, factor=0.1)}, REGISTRY), tmp_path)
    again = resolve(path, registry=load_registry("none"))
    assert again.clip_rule.info.function is halved and again.clip_rule.parameters == {"factor": 0.1}


@component(name="ppo_clip")
def another_ppo_clip(log_ratio: Any, advantages: Any) -> ClipResult:
    return ClipResult(loss=-log_ratio.exp() * advantages)


def test_a_function_that_has_a_built_in_name_stays_the_function(tmp_path: Path) -> None:
    recipe = resolve("grpo", {"clip_rule": use(another_ppo_clip)}, REGISTRY)
    again = resolve(written(recipe, tmp_path), registry=load_registry("none"))
    assert again.clip_rule.info.function is another_ppo_clip
    said = recipe_dict(recipe)
    said["slots"]["clip_rule"]["function"] = "tests.test_rebuilding.test.<locals>.ppo_clip"
    (tmp_path / "variant.json").write_text(json.dumps(said))
    with pytest.raises(VariantError, match="clip_rule 'ppo_clip' was tests.test_rebuilding.*, which is not there"):
        resolve(str(tmp_path / "variant.json"), registry=load_registry("none"))


def test_a_function_that_is_registered_is_its_owners(tmp_path: Path) -> None:
    given = resolve("grpo", {"clip_rule": ppo_clip}, REGISTRY)
    assert given.clip_rule.owner.distribution == "trl-variants"


@component
def total(part_advantages: list[Advantages], *, parts: list[Any] = []) -> Any:  # noqa: B006
    return sum(part.advantages for part in part_advantages)


def test_parts_are_rebuilt_with_all_their_parameters(tmp_path: Path) -> None:
    normalized = {"advantage_estimator": use("group_mean"), "advantage_normalizer": [use("group_std", eps=0.5)]}
    inner = {"advantage_estimator": use(total, parts=[normalized])}
    recipe = resolve("grpo", {"advantage_estimator": use(total, parts=[normalized, inner])}, REGISTRY)
    path = written(recipe, tmp_path)
    assert recipe_dict(resolve(path, registry=REGISTRY)) == recipe_dict(recipe)
    said = recipe_dict(recipe)  # as if the default had been another one then
    said["slots"]["advantage_estimator"]["parts"][0][0]["parameters"]["zero_constant"] = False
    (tmp_path / "variant.json").write_text(json.dumps(said))
    again = resolve(path, registry=REGISTRY)
    assert again.advantage_estimator.parts[0][0].parameters == {"zero_constant": False}


def test_a_component_that_is_gone_is_named_with_the_nearest(tmp_path: Path) -> None:
    said = recipe_dict(resolve("grpo", registry=REGISTRY))
    said["slots"]["clip_rule"] |= {"component": "ppo_clop", "function": "trl_variants.components.clip_rules.ppo_clop"}
    (tmp_path / "variant.json").write_text(json.dumps(said))
    with pytest.raises(VariantError, match="No clip_rule named 'ppo_clop'. Did you mean 'ppo_clip'?"):
        resolve(str(tmp_path / "variant.json"), registry=REGISTRY)


def test_another_version_is_told(tmp_path: Path) -> None:
    said = recipe_dict(resolve("reinforce", registry=REGISTRY))
    said["slots"]["clip_rule"]["version"] = "0.0.9"
    (tmp_path / "variant.json").write_text(json.dumps(said))
    with pytest.warns(UserWarning, match="was written with other versions: trl-variants 0.0.9, and trl-variants 0"):
        resolve(str(tmp_path / "variant.json"), registry=REGISTRY)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "There is no file"),
        ("{", "is not valid JSON"),
        ("[]", "is no variant.json"),
        ("{}", "is no variant.json"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "variant.json").write_text(text)
    with pytest.raises(VariantError, match=message):
        resolve(str(tmp_path / "variant.json"), registry=REGISTRY)


def test_a_run_is_trained_again_from_its_file_to_the_same_weights(tmp_path: Path) -> None:
    overrides = {"clip_rule": {"epsilon_high": 0.3}}
    train_config(CONFIGS / "grpo.yaml", tmp_path, steps=2, variant_overrides=overrides, seed=5)
    first = load_file(tmp_path / "out" / "model.safetensors")
    said = json.loads((tmp_path / "out" / "variant.json").read_text())
    assert said["run"]["seed"] == 5 and said["run"]["learning_rate"] == 1e-3 and said["run"]["lr_scheduler_type"]
    home = "trl_variants.conformance.training.low_words"
    assert [(reward["name"], reward["function"]) for reward in said["rewards"]] == [("low_words", home)]
    torch.manual_seed(99)
    job = parse(["--config", str(tmp_path / "out" / "variant.json"), "--output_dir", str(tmp_path / "again")])
    assert job.training.recipe.clip_rule.parameters["epsilon_high"] == 0.3
    run(job)
    second = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    again = json.loads((tmp_path / "again" / "variant.json").read_text())
    assert {key: value for key, value in again.items() if key != "run"} == {
        key: value for key, value in said.items() if key != "run"
    }


def test_every_way_of_giving_a_setting_on_the_line_is_in_the_file(tmp_path: Path) -> None:
    line = ["--seed=5", "--num-iterations", "2", "--no_gradient_checkpointing", "--max_comp", "16", "--use_cpu"]
    places = ["--model_name_or_path", str(tmp_path), "--dataset_name", str(tmp_path), "--reward_funcs", "a.b", "c.d"]
    parser = TrlParser((GRPOScriptArguments, VariantConfig, ModelConfig))
    assert _given(parser, [*line, *places]) == {
        "seed": 5,
        "num_iterations": 2,
        "gradient_checkpointing": False,
        "max_completion_length": 16,
        "use_cpu": True,
        "model_name_or_path": str(tmp_path),
        "dataset_name": str(tmp_path),
        "reward_funcs": ["a.b", "c.d"],
    }


def test_a_run_that_python_started_has_its_recipe_only(tmp_path: Path) -> None:
    path = written(resolve("grpo", registry=REGISTRY), tmp_path)
    with pytest.raises(
        VariantError, match="was not started by `trl-variants train`.* settings into a YAML file, with variant: "
    ):
        parse(["--config", path], anywhere=True)
