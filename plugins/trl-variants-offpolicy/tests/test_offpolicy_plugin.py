"""The plugin as a whole: the conformance kit, what the command line shows of it, and its YAML files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import trl_variants_offpolicy
import yaml

from trl_variants import load_registry, resolve
from trl_variants.objective import formula_text
from trl_variants.testing import check_plugin, train_config

PLUGIN = "trl_variants_offpolicy"
REGISTRY = load_registry("none", extra=[PLUGIN])
CONFIGS = Path(__file__).parent.parent / "configs"
VARIANTS = sorted(REGISTRY.variants.keys() - load_registry("none").variants.keys())


def test_the_kit_finds_nothing() -> None:
    held = check_plugin(trl_variants_offpolicy)
    assert {name.partition(".")[2] for name in held if name.startswith("variant.")} == set(VARIANTS)
    rules = {name: held[f"clip_rule.{name}"] for name in ("dppo_tv", "dppo_kl", "topr", "m2po")}
    assert all("the_gradient_on_policy_is_minus_the_advantage" in properties for properties in rules.values())
    cut = {name for name, properties in held.items() if "the_cut_changes_no_gradient" not in properties}
    assert cut == {"clip_rule.m2po", "token_weight.second_moment_mask", "variant.m2po"}  # the moment is a batch's


@pytest.mark.parametrize(
    ("variant", "line"),
    [
        ("icepop", "wᵢₜ = π_old / π_sampler (token_mask, [0.5, 5])"),
        ("geo_is_grpo", "wᵢₜ = (π_old(oᵢ) / π_sampler(oᵢ))^(1/|oᵢ|) (truncate, [none, 1.2])"),
        ("geo_rs_grpo", "wᵢₜ = 1[seq_mean of k1 (π_sampler, π_old) ∈ [-0.001, 0.001]]"),
        ("opsm_grpo", "off_policy_mask = 1[Âᵢₜ ≥ 0 or 1/|oᵢ| Σₜ log(π_sampler(oᵢₜ) / π_θ(oᵢₜ)) ≤ 0.5]"),
        (
            "topr",
            "ℓᵢₜ = -sg[wᵢ] Âᵢ log π_θ(oᵢₜ), wᵢ = 1 where Âᵢ ≥ 0, else min(π_θ / π_sampler, 1) of the sequence",
        ),
        (
            "m2po",
            "ℓᵢₜ = -Mᵢₜ π_θ(oᵢₜ)/π_sampler(oᵢₜ) Âᵢ, Mᵢₜ masks the largest log²(π_θ / π_sampler) until their mean is at "
            "most 0.04",
        ),
    ],
)
def test_the_formula_reads_right(variant: str, line: str) -> None:
    assert line in formula_text(resolve(variant, registry=REGISTRY))


def test_every_variant_names_its_paper_and_its_config() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == VARIANTS
    for name in VARIANTS:
        variant = REGISTRY.variant(name)
        assert variant.paper and variant.summary


def test_the_version_is_that_of_the_distribution() -> None:
    project = (CONFIGS.parent / "pyproject.toml").read_text()
    assert f'\nversion = "{trl_variants_offpolicy.__version__}"\n' in project


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_says_what_the_variant_says(variant: str) -> None:
    config = yaml.safe_load((CONFIGS / f"{variant}.yaml").read_text())
    assert config["variant"] == variant
    overrides = config["variant_overrides"]
    if variant == "topr":  # whose reward is 0 or 1 in the file
        assert overrides.pop("advantage_estimator") == {"baseline": 0.5}
    recipes = resolve(variant, overrides, REGISTRY), resolve(variant, None, REGISTRY)
    said, own = ([str(bound) for bound in recipe.components] for recipe in recipes)
    assert said == own


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_trains(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    sizes: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    sizes["steps_per_generation"] = 4
    if variant == "decoupled_ppo":  # one completion per prompt, so a rollout takes more of the prompts
        sizes |= {"per_device_train_batch_size": 4, "critic_warmup_steps": 1}
    log = train_config(CONFIGS / f"{variant}.yaml", tmp_path, steps=3, plugins=[PLUGIN], **sizes)
    assert len(log) == 3
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in log)
    assert log[-1]["grad_norm"] > 0
    assert (tmp_path / "out" / "variant.json").is_file()
