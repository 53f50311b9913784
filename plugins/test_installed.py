"""The plugins as users have them: installed from wheels, found by themselves, named in a config. Run by `make test`."""

from __future__ import annotations

import json
import math
from importlib import import_module, metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trl_variants import load_registry, resolve
from trl_variants.cli.main import app
from trl_variants.testing import check_plugin, train_config

HERE = Path(__file__).parent
NAMES = sorted(path.parent.name for path in HERE.glob("*/pyproject.toml"))
REGISTRY = load_registry()


def test_every_plugin_is_installed_from_its_wheel() -> None:
    assert len(NAMES) >= 5
    for name in NAMES:
        module = Path(import_module(name.replace("-", "_")).__file__ or "")
        assert HERE not in module.resolve().parents, f"{name}: its source is imported in place of the wheel"
        assert metadata.version(name)
    assert {owner.distribution for owner in REGISTRY.plugins} == {"trl-variants", *NAMES}


def test_nothing_is_broken_disputed_shadowed_or_incompatible() -> None:
    done = CliRunner().invoke(app, ["doctor", "--quick", "--json"])
    assert json.loads(done.stdout)["problems"] == [] and done.exit_code == 0


@pytest.mark.parametrize("variant", [v for v in REGISTRY.variants if REGISTRY.owner("variant", v).plugin != "builtins"])
def test_every_variant_of_a_plugin_resolves_and_has_a_config(variant: str) -> None:
    recipe = resolve(variant, registry=REGISTRY)
    owner = REGISTRY.owner("variant", variant).distribution
    config = HERE / owner / "configs" / f"{variant}.yaml"
    assert f"variant: {variant}\n" in config.read_text() and recipe.variant.summary and recipe.variant.name == variant


@pytest.mark.parametrize("name", [name for name in NAMES if list((HERE / name / "configs").glob("*.yaml"))])
def test_a_config_names_what_is_installed_and_trains(name: str, tmp_path: Path) -> None:
    config = min((HERE / name / "configs").glob("*.yaml"))
    warmup = {"critic_warmup_steps": 1} if "critic_warmup_steps" in config.read_text() else {}
    log = train_config(config, tmp_path, **warmup)
    assert len(log) == 3 and all(math.isfinite(step["loss"]) for step in log)
    said = json.loads((tmp_path / "out" / "variant.json").read_text())
    assert (said["variant"], said["distribution"], said["version"]) == (config.stem, name, metadata.version(name))
    assert said["versions"][name] == metadata.version(name)


def test_the_kit_takes_the_name_of_a_distribution() -> None:
    held = check_plugin("trl-variants-blend")
    assert set(held) == {"advantage_estimator.weighted_sum", "variant.ppo_grpo_blend"}
