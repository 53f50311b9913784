"""The plugin as a whole: the conformance kit, its configs trained, its formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl_variants_baselines
import yaml
from baselines_common import recipe

from trl_variants import Variant, VariantError
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


@pytest.mark.parametrize(
    ("variant", "overrides", "message"),
    [
        ("maxrl", {"eps": -1.0}, "advantage_estimator 'maxrl': eps must not be negative."),
        (
            "pass_at_k",
            {"k": 0},
            "advantage_estimator 'pass_at_k': k must be at least 1 and eps must not be negative.",
        ),
        (
            "gpg",
            {"counted": "all"},
            "advantage_estimator 'gpg': counted must be one of 'varied', 'nonzero', not 'all'.",
        ),
        ("remax", {"gamma": 1.5}, "advantage_estimator 'remax': gamma must be between 0 and 1."),
        ("reinforce_ema", {"decay": 1.0}, "advantage_estimator 'ema_baseline': decay must be at least 0 and below 1."),
        (
            "reinforce_running",
            {"start": 0.5, "include_current": True},
            "advantage_estimator 'running_baseline': start has no effect with include_current: the first rollout has a "
            "mean of its own.",
        ),
        (
            "vapo",
            {"alpha": 0.0},
            "advantage_estimator 'length_adaptive_gae': alpha must be above 0, gamma and lam_returns between 0 and 1.",
        ),
    ],
)
def test_parameters_out_of_range_are_refused(variant: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(VariantError) as error:
        recipe(variant, advantage_estimator=overrides)
    assert str(error.value) == message


def test_a_correction_other_than_0_and_1_is_refused() -> None:
    with pytest.raises(VariantError) as error:
        recipe("loo_grpo", advantage_normalizer={"correction": 2})
    assert str(error.value) == (
        "advantage_normalizer 'leave_one_out_std': correction must be 0 (population) or 1 (sample)."
    )
