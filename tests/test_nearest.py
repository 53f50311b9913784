"""Whatever is misspelt, at whatever level, the nearest valid one is in the error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trl_variants import VariantConfig, VariantError, component, hookimpl, load_registry, resolve
from trl_variants.registry import Owner
from trl_variants.testing import check_component
from trl_variants.trainer.launch import parse

REGISTRY = load_registry("none")
PART = [{"advantage_estimatr": "gae"}]


def override(**overrides: Any) -> Callable[[Path], object]:
    return lambda folder: resolve("grpo", overrides, REGISTRY)


def file(**settings: Any) -> Callable[[Path], object]:
    def check(folder: Path) -> object:
        lines = [f"{key}: {value}" for key, value in settings.items()]
        (folder / "config.yaml").write_text("\n".join(["model_name_or_path: m", "dataset_name: d", *lines]))
        return parse(["--config", str(folder / "config.yaml")], anywhere=True)

    return check


def registered(**hooks: Any) -> Callable[[Path], object]:
    plugin = SimpleNamespace(__name__="mine", **hooks)
    return lambda folder: load_registry("none").add(plugin, Owner("mine", "mine", ""))


@hookimpl
def register_clip_ruls() -> list[Any]:
    return []


@component
def names_a_wrong_input(log_ratios: Any, advantages: Any) -> Any:
    return None


@hookimpl
def register_clip_rules() -> list[Any]:
    return [names_a_wrong_input]


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a variant": (lambda folder: resolve("dr_gpro", registry=REGISTRY), "dr_grpo"),
    "a variant in a file": (file(variant="dr_gpro"), "dr_grpo"),
    "a key of a file": (file(learning_rat=1.0), "learning_rate"),
    "a slot in a file": (file(clip_rule="cispo"), "Put it under variant_overrides"),
    "an option": (lambda folder: parse(["--learning_rat", "1"], anywhere=True), "learning_rate"),
    "a reward function": (file(reward_funcs="[acuracy_reward]"), "accuracy_reward"),
    "a slot": (override(clip_ruel="cispo"), "clip_rule"),
    "a slot of KL": (override(kl_estimator="k2"), "Write kl: {estimator: ...}"),
    "a component": (override(clip_rule="cisop"), "cispo"),
    "a component of another slot": (override(clip_rule="group_std"), "'group_std' is a advantage_normalizer"),
    "a parameter": (override(clip_rule={"epsilon_hihg": 0.3}), "epsilon_high"),
    "a key of KL": (override(kl={"coeff": 0.1}), "coef"),
    "an estimator of KL": (override(kl={"estimator": "kk2"}), "k2"),
    "a placement of KL": (override(kl={"placement": "losss"}), "loss"),
    "a controller of KL": (override(kl={"controller": "adaptiv"}), "adaptive"),
    "a hook": (registered(register_clip_ruls=register_clip_ruls), "register_clip_rules"),
    "an input": (registered(register_clip_rules=register_clip_rules), "log_ratio"),
    "a declaration": (lambda folder: component(group_centered=True), "group_centred"),
    "a slot of the registry": (lambda folder: REGISTRY.components("clip_ruel"), "clip_rule"),
    "a property": (
        lambda folder: check_component("clip_rule", "cispo", excepted=["row_order_decide_nothing"]),
        "row_order_decides_nothing",
    ),
    "a field of the config": (
        lambda folder: VariantConfig(str(folder), variant="grp", use_cpu=True, bf16=False),
        "grpo",
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_a_misspelt_name_is_answered_with_the_nearest(what: str, tmp_path: Path) -> None:
    call, nearest = CASES[what]
    with pytest.raises(VariantError) as error:
        call(tmp_path)
    said = nearest if " " in nearest else f"Did you mean '{nearest}'?"
    assert said in str(error.value)
