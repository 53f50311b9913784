"""The plugin as a whole: the conformance kit, its configs trained, its formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl_variants_baselines
import yaml
from baselines_common import recipe

from trl_variants import Variant
from trl_variants.testing import check_plugin, train_config

CONFIGS = Path(__file__).parent.parent / "configs"
VARIANTS: list[Variant] = trl_variants_baselines.register_variants()
NAMES = [variant.name for variant in VARIANTS]
#: What the sizes of a test need.
SIZES: dict[str, dict[str, Any]] = {
    # its reward is a share, never 0
    "pass_at_k": {"num_generations": 8, "variant_overrides": {"advantage_estimator": {"threshold": 0.5}}},
    "vapo": {"critic_warmup_steps": 1, "steps_per_generation": 4},
}


def test_everything_conforms() -> None:
    held = check_plugin(trl_variants_baselines)
    assert set(held) >= {f"variant.{name}" for name in NAMES}
    centred = {"opo", "gpg", "maxrl", "pass_at_k", "grpo_passk"}
    assert all("constant_groups_get_zero" in held[f"advantage_estimator.{name}"] for name in centred)


def test_there_is_one_config_for_every_variant() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_says_of_its_variant_what_the_variant_says(name: str) -> None:
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert config["variant"] == name
    overridden = recipe(name, **config["variant_overrides"])
    assert list(map(str, overridden.components)) == list(map(str, recipe(name).components))
    overridden.check_generations(config["num_generations"])


@pytest.mark.parametrize("name", NAMES)
def test_a_config_trains_its_variant(name: str, tmp_path: Path) -> None:
    log = train_config(CONFIGS / f"{name}.yaml", tmp_path, plugins=["trl_variants_baselines"], **SIZES.get(name, {}))
    assert len(log) == 3
    assert any(entry["grad_norm"] > 0 for entry in log)
    assert json.loads((tmp_path / "out" / "variant.json").read_text())["variant"] == name


def test_every_variant_says_what_it_is() -> None:
    for variant in VARIANTS:
        assert variant.summary and variant.extends
        whole = recipe(variant.name)
        assert whole.advantage_estimator.info.formula
