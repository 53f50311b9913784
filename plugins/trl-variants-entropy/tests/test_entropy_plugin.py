"""The plugin as a whole: the kit, what each variant is made of, its formula, and training from its YAML."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import trl_variants_entropy

from trl_variants import load_registry, resolve
from trl_variants.registry import Owner
from trl_variants.testing import NonConformance, check_component, check_plugin, train_config
from trl_variants.trainer.launch import parse

REGISTRY = load_registry("none")
REGISTRY.add(trl_variants_entropy, Owner("trl-variants-entropy", "trl_variants_entropy", "0.1.0"))
HERE = Path(__file__).parent.parent
VARIANTS = ["clip_cov", "forking_tokens", "kl_cov", "skywork_or1"]
ON_POLICY = "the_gradient_on_policy_is_minus_the_advantage"


def test_everything_that_is_registered_conforms() -> None:
    held = check_plugin(trl_variants_entropy)
    assert sorted(name.removeprefix("variant.") for name in held if name.startswith("variant.")) == VARIANTS


#: Parameters with which the rules act on many of the kit's few tokens.
ACTIVE = [
    ("clip_rule", "clip_cov", {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0, "clip_cov_ratio": 0.4}),
    ("clip_rule", "clip_cov", {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0, "epsilon_low": 0.2, "epsilon_high": 0.2}),
    ("clip_rule", "kl_cov", {"kl_cov_ratio": 0.4}),
    ("clip_rule", "kl_cov", {"kl_cov_ratio": 0.3, "penalty": "k3"}),
    ("token_weight", "high_entropy_mask", {"top_entropy_quantile": 0.0}),
    ("token_weight", "high_entropy_mask", {"top_entropy_quantile": 0.6}),
]


@pytest.mark.parametrize(("slot", "name", "parameters"), ACTIVE)
def test_components_conform_where_they_act_on_many_tokens(slot: str, name: str, parameters: dict[str, Any]) -> None:
    # What Clip-Cov draws loses its gradient at ratio 1 too: that is the method.
    excepted = [ON_POLICY] if name == "clip_cov" else []
    held = check_component(slot, name, parameters=parameters, registry=REGISTRY, excepted=excepted)
    assert {"masked_junk_changes_nothing", "row_order_decides_nothing", "extremes_are_finite"} <= set(held)


def test_clip_cov_does_take_gradient_away_on_policy() -> None:
    with pytest.raises(NonConformance, match="at ratio 1 it reports clipping: {'metric clip_ratio/dual_mean'"):
        check_component("clip_rule", "clip_cov", parameters=ACTIVE[0][2], registry=REGISTRY)


def components(variant: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for bound in resolve(variant, registry=REGISTRY).components:
        found.setdefault(bound.slot, []).append(bound.name)
    return found


@pytest.mark.parametrize(
    ("variant", "base", "differs"),
    [
        ("forking_tokens", "dapo", {"token_weight": ["rollout_correction", "high_entropy_mask"]}),
        ("clip_cov", "dapo", {"reward_shaper": None, "clip_rule": ["clip_cov"]}),
        ("kl_cov", "dapo", {"reward_shaper": None, "clip_rule": ["kl_cov"]}),
        (
            "skywork_or1",
            "trl_dapo",  # for its slots: token mean and no KL
            {"sample_filter": ["zero_variance"], "regularizer": ["adaptive_entropy"]},
        ),
    ],
)
def test_a_variant_differs_from_its_base_in_this_only(variant: str, base: str, differs: dict[str, Any]) -> None:
    want = {slot: names for slot, names in {**components(base), **differs}.items() if names}
    assert components(variant) == want
    sampling = {v: resolve(v, registry=REGISTRY).variant.sampling for v in VARIANTS}
    assert sampling == {
        "clip_cov": "resample",
        "forking_tokens": "resample",
        "kl_cov": "resample",
        "skywork_or1": "mask",
    }


def test_there_is_one_config_for_every_variant() -> None:
    assert sorted(path.stem for path in (HERE / "configs").glob("*.yaml")) == VARIANTS


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_says_of_its_variant_what_the_variant_says(variant: str) -> None:
    line = ["--config", str(HERE / "configs" / f"{variant}.yaml"), "--variant_plugins", "trl_variants_entropy"]
    recipe = parse(line, anywhere=True).training.recipe
    assert recipe.variant.name == variant
    assert list(map(str, recipe.components)) == list(map(str, resolve(variant, registry=REGISTRY).components))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_trains(variant: str, tmp_path: Any) -> None:
    path = HERE / "configs" / f"{variant}.yaml"
    smaller = {"steps_per_generation": 4} if "steps_per_generation" in path.read_text() else {}
    log = train_config(path, tmp_path, steps=3, plugins=["trl_variants_entropy"], num_iterations=2, **smaller)
    assert len(log) == 3 and all(entry["grad_norm"] > 0 for entry in log)
    assert json.loads((tmp_path / "out" / "variant.json").read_text())["variant"] == variant
    if variant == "clip_cov":
        assert all(0 <= entry["clip_ratio/dual_mean"] <= 0.2 for entry in log)
    if variant == "skywork_or1":
        assert "adaptive_entropy" in log[0]


def test_modules_import_public_names_only_and_stay_short() -> None:
    allowed = {"__future__", "collections.abc", "math", "typing", "torch", "trl_variants"}
    for path in (HERE / "trl_variants_entropy").glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 300
        for node in ast.walk(ast.parse(text)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert all(n in allowed or n.startswith("trl_variants_entropy") for n in names), f"{path}: {names}"
