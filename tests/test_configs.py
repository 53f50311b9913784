"""Every file in configs/ trains, and says of its variant what the variant itself says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tiny
from trl_variants import load_registry, resolve
from trl_variants.testing import train_config
from trl_variants.trainer.launch import parse, run

CONFIGS = Path(__file__).parent.parent / "configs"
BUILT_IN = sorted(load_registry("none").variants)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    model, data = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("data")
    return {"model": tiny.llama_folder(model), "data": tiny.dataset_folder(data)}


def test_there_is_one_config_for_every_variant() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == BUILT_IN


@pytest.mark.parametrize("variant", BUILT_IN)
def test_a_config_trains_its_variant(variant: str, tmp_path: Any) -> None:
    path = CONFIGS / f"{variant}.yaml"
    settings: dict[str, Any] = {}
    if "critic_warmup_steps" in path.read_text():
        settings |= {"critic_warmup_steps": 1, "steps_per_generation": 4}
    if variant == "dapo":  # its penalty's slope of 256 tokens does not fit into 6
        settings["variant_overrides"] = {"reward_shaper": {"cache": 2}}
    log = train_config(path, tmp_path, steps=2, **settings)
    assert len(log) == 2
    assert json.loads((tmp_path / "out" / "variant.json").read_text())["variant"] == variant
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("variant", sorted({*BUILT_IN} - {"dapo"}))
def test_a_config_says_of_its_variant_what_the_variant_says(variant: str) -> None:
    training = parse(["--config", str(CONFIGS / f"{variant}.yaml")], anywhere=True).training
    assert training.recipe.variant.name == variant
    assert list(map(str, training.recipe.components)) == list(map(str, resolve(variant).components))


RECIPES = sorted(path.stem for path in (CONFIGS / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_published_recipe_trains(
    recipe: str, places: dict[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With models that stand in for its own, and the sizes of a test; its variant and its overrides are the file's."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    judge = tiny.judge_folder(tmp_path / "judge")
    path = CONFIGS / "recipes" / f"{recipe}.yaml"
    line = [
        *("--config", str(path), "--model_name_or_path", places["model"], "--dataset_name", places["data"]),
        *("--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--bf16", "false", "--report_to", "none"),
        *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--steps_per_generation", "4"),
        *("--max_steps", "4", "--max_completion_length", "6"),
    ]
    text = path.read_text()
    for key, value in (
        ("reward_model_name_or_path", judge),
        ("critic_model", judge),
        ("reward_funcs", "tests.tiny.low_words"),
    ):
        line += [f"--{key}", str(value)] if f"\n{key}:" in text else []
    job = parse(line)
    assert yaml.safe_load(text)["variant_overrides"] == job.training.variant_overrides
    run(job)
    assert (tmp_path / "out" / "variant.json").is_file()


def test_the_recipes_have_the_coefficients_of_their_papers() -> None:
    got = {name: yaml.safe_load((CONFIGS / "recipes" / f"{name}.yaml").read_text()) for name in RECIPES}
    coefs = {name: config["variant_overrides"]["kl"]["coef"] for name, config in got.items()}
    assert coefs == {"instructgpt": 0.02, "llama2_chat": 0.01, "tulu3_rlvr": 0.05}


def test_the_dapo_config_differs_from_the_variant_only_in_the_width_of_its_penalty() -> None:
    training = parse(["--config", str(CONFIGS / "dapo.yaml")], anywhere=True).training
    mine, own = list(map(str, training.recipe.components)), list(map(str, resolve("dapo").components))
    assert [(a, b) for a, b in zip(mine, own, strict=True) if a != b] == [
        ("soft_overlong(cache=256)", "soft_overlong(cache=None)")
    ]
    assert 256 == training.max_completion_length // 5
