"""The plugin as a whole: the contract of the conformance kit, what it registers, and training from each YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl_variants_soft
import yaml

from trl_variants import load_registry, resolve
from trl_variants.testing import check_plugin, train_config

HERE = Path(__file__).parent.parent
REGISTRY = load_registry("none", extra=["trl_variants_soft"])
VARIANTS = [variant.name for variant in trl_variants_soft.register_variants()]


def test_everything_keeps_the_contract() -> None:
    held = check_plugin(trl_variants_soft)
    assert {name.partition(".")[2] for name in held if name.startswith("variant.")} == set(VARIANTS)
    assert len(held) == len(VARIANTS) + 6  # and the components
    for rule in ("sapo", "vespo", "gmpo"):
        assert "the_gradient_on_policy_is_minus_the_advantage" in held[f"clip_rule.{rule}"]


def test_there_is_one_config_for_every_variant_and_a_line_in_the_readme() -> None:
    assert sorted(path.stem for path in (HERE / "configs").glob("*.yaml")) == sorted(VARIANTS)
    readme = (HERE / "README.md").read_text()
    assert [name for name in VARIANTS if f"](configs/{name}.yaml)" not in readme] == []


def settings(variant: str) -> dict[str, Any]:
    return yaml.safe_load((HERE / "configs" / f"{variant}.yaml").read_text())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_says_of_its_variant_what_the_variant_says(variant: str) -> None:
    given = settings(variant)
    assert given["variant"] == variant
    with_overrides = resolve(variant, given["variant_overrides"], REGISTRY)
    assert [*map(str, with_overrides.components)] == [*map(str, resolve(variant, None, REGISTRY).components)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_trains(variant: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"learning_rate": 1e-2}
    if "steps_per_generation" in settings(variant):
        more["steps_per_generation"] = 4
    if variant == "two_sided_grpo":
        more["num_generations"] = 8
    logs = train_config(HERE / "configs" / f"{variant}.yaml", tmp_path, steps=3, plugins=["trl_variants_soft"], **more)
    assert len(logs) == 3 and logs[0]["grad_norm"] > 0
    assert (tmp_path / "out" / "variant.json").is_file()


def test_overrides_of_the_readme_give_the_conventions_of_trl() -> None:
    block = (HERE / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    overrides = yaml.safe_load(block)["variant_overrides"]
    mine, trl = resolve("sapo", overrides, REGISTRY), resolve("trl_grpo", None, REGISTRY)
    for part in ("advantage_estimator", "loss_aggregator"):
        assert str(getattr(mine, part)) == str(getattr(trl, part))
    assert [*map(str, mine.advantage_normalizers)] == [*map(str, trl.advantage_normalizers)]
