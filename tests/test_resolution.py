"""From names and overrides to a recipe: every form of override, inheritance, and whole error texts."""

from __future__ import annotations

from typing import Any

import pytest

from trl_variants import KL, Variant, VariantError, __version__, resolve, use
from trl_variants.overrides import is_off
from trl_variants.recipe import Recipe
from trl_variants.registry import load_registry

REGISTRY = load_registry("none")
CLIP_RULES = ", ".join(f"{n} (trl-variants {__version__})" for n in sorted(REGISTRY.components("clip_rule")))
KEYS = (
    "sample_filter, reward_shaper, advantage_estimator, advantage_normalizer, importance_ratio, clip_rule, "
    "token_weight, regularizer, loss_aggregator, kl, critic, reshuffle, sampling"
)


def of(variant: str | Variant, **overrides: Any) -> Recipe:
    return resolve(variant, overrides, REGISTRY)


def message(variant: str | Variant, overrides: Any = None, registry: Any = REGISTRY) -> str:
    with pytest.raises(VariantError) as error:
        resolve(variant, overrides, registry)
    return str(error.value)


# -- the texts of design.md §3 (that of loss_type is in tests/trainer/test_config.py) ---------------------------------


def test_a_misspelt_component() -> None:
    assert message("grpo", {"clip_rule": "ppo_clp"}) == (
        f"No clip_rule named 'ppo_clp'. Did you mean 'ppo_clip'? Registered: {CLIP_RULES}."
    )
    assert CLIP_RULES.startswith(f"cispo (trl-variants {__version__}), ")


def test_a_misspelt_parameter() -> None:  # pains G10
    expected = "clip_rule 'ppo_clip' has no parameter 'epsilon_hi'. Did you mean 'epsilon_high'?"
    assert message("grpo", {"clip_rule": {"epsilon_hi": 0.3}}) == expected
    assert message("grpo", {"clip_rule": {"name": "ppo_clip", "epsilon_hi": 0.3}}) == expected


def test_an_estimator_that_needs_a_critic() -> None:
    variant = Variant(name="x", extends="dr_grpo", advantage_estimator="gae")
    assert message(variant) == "advantage_estimator 'gae' needs values, and variant 'x' has no critic."


def test_too_few_generations() -> None:  # pains B24
    with pytest.raises(VariantError) as error:
        of("grpo").check_generations(1)
    assert str(error.value) == (
        "advantage_estimator 'group_mean' needs at least 2 generations per prompt; num_generations is 1."
    )
    for name in ("reinforce", "reinforce_pp"):
        assert of(name).min_generations == 1
        of(name).check_generations(1)
    assert of("rloo").min_generations == 2


# -- overrides, form by form ------------------------------------------------------------------------------------------


def clip_rule(**overrides: Any) -> tuple[str, dict]:
    bound = of("dapo", **overrides).clip_rule
    return bound.name, dict(bound.parameters)


@pytest.mark.parametrize(
    ("override", "name", "parameters"),
    [
        # the variant's own component keeps the variant's parameters, however it is named
        ("ppo_clip", "ppo_clip", {"epsilon_low": 0.2, "epsilon_high": 0.28}),
        ({"name": "ppo_clip"}, "ppo_clip", {"epsilon_low": 0.2, "epsilon_high": 0.28}),
        ({}, "ppo_clip", {"epsilon_low": 0.2, "epsilon_high": 0.28}),
        ({"epsilon_low": 0.1}, "ppo_clip", {"epsilon_low": 0.1, "epsilon_high": 0.28}),
        ({"name": "ppo_clip", "epsilon_low": 0.1}, "ppo_clip", {"epsilon_low": 0.1, "epsilon_high": 0.28}),
        # another one starts from its own defaults
        ("dual_clip", "dual_clip", {"epsilon_low": 0.2, "epsilon_high": 0.2, "c": 3.0}),
        ({"name": "dual_clip", "c": 4}, "dual_clip", {"epsilon_low": 0.2, "epsilon_high": 0.2, "c": 4.0}),
        # use(...) says everything
        (use("ppo_clip", epsilon_low=0.1), "ppo_clip", {"epsilon_low": 0.1, "epsilon_high": 0.2}),
        # numbers as YAML 1.1 reads them
        ({"epsilon_low": "3e-4"}, "ppo_clip", {"epsilon_low": 3e-4, "epsilon_high": 0.28}),
        ({"epsilon_low": "1e-6"}, "ppo_clip", {"epsilon_low": 1e-6, "epsilon_high": 0.28}),
    ],
)
def test_a_slot_of_one(override: Any, name: str, parameters: dict) -> None:
    assert clip_rule(clip_rule=override) == (name, parameters)


def test_what_is_not_overridden_is_inherited() -> None:
    changed, original = of("dapo", clip_rule={"epsilon_low": 0.1}), of("dapo")
    assert changed.loss_aggregator == original.loss_aggregator
    assert changed.sample_filters == original.sample_filters
    assert of("dapo", **{}).clip_rule == original.clip_rule
    assert resolve("dapo", None, REGISTRY).clip_rule == original.clip_rule


@pytest.mark.parametrize("off", [None, "none", "None", "null", "off", False, [], ()])
def test_every_way_to_switch_a_slot_off(off: Any) -> None:  # pains B12
    assert is_off(off)
    slots = ("sample_filter", "reward_shaper", "advantage_normalizer", "token_weight", "kl")
    recipe = of("dapo", **dict.fromkeys(slots, off), sampling="mask")
    assert recipe.sample_filters == recipe.reward_shapers == recipe.advantage_normalizers == recipe.token_weights == ()
    assert recipe.kl is None
    assert of("grpo", kl=off).kl is None
    assert of("reinforce", importance_ratio=off).importance_ratio.name == "none"
    assert message("dapo", {"clip_rule": off}) == (
        f"clip_rule cannot be switched off. Registered: {', '.join(sorted(REGISTRY.components('clip_rule')))}."
    )


@pytest.mark.parametrize("value", [True, 3, 0.5])
def test_a_value_that_is_no_component_is_refused(value: Any) -> None:  # pains B12
    for slot in ("advantage_normalizer", "clip_rule"):
        assert message("grpo", {slot: value}) == f"{slot} must be a name or a mapping, not {value!r}."


def test_scaling_modes_of_trl_are_no_names_here_and_the_error_lists_what_is() -> None:  # pains B12
    assert message("grpo", {"advantage_normalizer": "group"}) == (
        "No advantage_normalizer named 'group'. Did you mean 'group_std'? Registered: "
        f"batch_std (trl-variants {__version__}), group_std (trl-variants {__version__})."
    )


def test_lists_replace_and_keep_the_parameters_of_what_they_name_again() -> None:
    shapers = [{"name": "soft_overlong", "cache": 7}, "clip_rewards", {"name": "missing_eos_penalty", "penalty": 2}]
    first = of("dapo", reward_shaper=shapers)
    assert [str(b) for b in first.reward_shapers] == [
        "soft_overlong(cache=7)",
        "clip_rewards(low=-10.0, high=10.0)",
        "missing_eos_penalty(penalty=2.0)",
    ]
    again = resolve(first.variant, {"reward_shaper": ["soft_overlong", {"name": "missing_eos_penalty"}]}, REGISTRY)
    assert [str(b) for b in again.reward_shapers] == ["soft_overlong(cache=7)", "missing_eos_penalty(penalty=2.0)"]
    one = resolve(first.variant, {"reward_shaper": {"name": "clip_rewards", "low": 0}}, REGISTRY)
    assert [str(b) for b in one.reward_shapers] == ["clip_rewards(low=0.0, high=10.0)"]


def test_lists_that_make_no_sense() -> None:
    assert message("grpo", {"clip_rule": ["ppo_clip"]}) == "clip_rule takes one component, not a list."
    assert message("grpo", {"reward_shaper": ["clip_rewards", "clip_rewards"]}) == (
        "reward_shaper lists 'clip_rewards' more than once."
    )
    assert message("grpo", {"reward_shaper": {"cache": 4}}) == (
        "reward_shaper is empty here, so the override must name a component: {name: ...}."
    )
    two = Variant(name="x", extends="grpo", reward_shaper=["clip_rewards", "soft_overlong"])
    assert message(two, {"reward_shaper": {"cache": 4}}) == (
        "reward_shaper holds 2 components here, so the override must say which: {name: ...}."
    )
    assert message("grpo", {"reward_shaper": [["clip_rewards"]]}) == (
        "reward_shaper must be a name or a mapping, not ['clip_rewards']."
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"clip_rul": "x"}, f"variant_overrides has no key 'clip_rul'. Did you mean 'clip_rule'? Keys: {KEYS}."),
        ({"zzz": 1}, f"variant_overrides has no key 'zzz'. Keys: {KEYS}."),
        (
            {"kl_estimator": "k2"},
            f"variant_overrides has no key 'kl_estimator'. Write kl: {{estimator: ...}}. Keys: {KEYS}.",
        ),
        (["clip_rule"], "variant_overrides must be a mapping by slot, not list."),
        ("clip_rule", "variant_overrides must be a mapping by slot, not str."),
        ({"sampling": "dynamic"}, "sampling must be 'mask' or 'resample', not 'dynamic'."),
        ({"sampling": None}, "sampling must be 'mask' or 'resample', not None."),
        (
            {"sampling": "resample"},
            "sampling 'resample' draws again for what a sample_filter drops, and variant 'grpo' has none, so it would "
            "never draw again. Use sample_filter: zero_variance, or sampling: mask.",
        ),
        ({"critic": "both"}, "critic must be 'separate', 'shared' or none, not 'both'."),
        (
            {"critic": "shared"},
            "variant 'grpo' has a critic, and advantage_estimator 'group_mean' does not read its values. Use "
            "advantage_estimator: gae, or critic: none and no value_loss.",
        ),
        ({"reshuffle": 3}, "reshuffle must be true or false, not 3."),
        (
            {"importance_ratio": None},
            "clip_rule 'ppo_clip' clips a ratio, and importance_ratio 'none' fixes it at 1. "
            "Use clip_rule: policy_gradient, or importance_ratio: token.",
        ),
        (
            {"clip_rule": "policy_gradient"},
            "importance_ratio 'token' has no effect: clip_rule 'policy_gradient' reads no ratio. "
            "Use importance_ratio: none, or another clip_rule.",
        ),
        (
            {"clip_rule": {"epsilon_low": True}},
            "clip_rule 'ppo_clip': epsilon_low must be a number, not True.",
        ),
    ],
)
def test_overrides_that_are_refused(overrides: Any, expected: str) -> None:
    assert message("grpo", overrides) == expected


# -- kl ---------------------------------------------------------------------------------------------------------------


def kl_of(variant: str, value: Any) -> list[str]:
    kl = of(variant, kl=value).kl
    return [str(kl.estimator), str(kl.placement), str(kl.controller), str(kl.coef)]


def test_kl_is_overridden_part_by_part() -> None:
    assert kl_of("grpo", {}) == ["k3", "loss(weighted=False)", "fixed", "0.04"]
    assert kl_of("grpo", {"coef": "1e-3"}) == ["k3", "loss(weighted=False)", "fixed", "0.001"]
    assert kl_of("grpo", {"estimator": "k2"}) == ["k2", "loss(weighted=False)", "fixed", "0.04"]
    assert kl_of("grpo", {"weighted": True})[1] == "loss(weighted=True)"
    assert kl_of("grpo", {"weighted": "detached"})[1] == "loss(weighted=detached)"
    assert kl_of("grpo", {"placement": {"name": "loss", "weighted": True}})[1] == "loss(weighted=True)"
    adaptive = {"controller": {"name": "adaptive", "target": "6.0", "level": "sequence"}}
    assert kl_of("rloo", adaptive) == [
        "k1",
        "sequence_reward",
        "adaptive(target=6.0, horizon=10000.0, level=sequence)",
        "0.05",
    ]
    whole = {"estimator": "k1", "placement": "token_reward", "coef": 0.1}
    assert kl_of("dapo", whole) == ["k1", "token_reward", "fixed", "0.1"]
    assert kl_of("dapo", KL("k2", placement="loss", coef=1)) == ["k2", "loss(weighted=False)", "fixed", "1.0"]


@pytest.mark.parametrize(
    ("variant", "value", "expected"),
    [
        (
            "grpo",
            {"estimater": "k2"},
            "kl has no key 'estimater'. Did you mean 'estimator'? Keys: estimator, placement, coef, weighted, "
            "controller.",
        ),
        (
            "grpo",
            0.1,
            "kl must be a mapping with the keys estimator, placement, coef, weighted, controller, or none; not 0.1.",
        ),
        (
            "dapo",
            {"coef": 0.1},
            "variant 'dapo' has no KL of its own, so kl must also set estimator, placement; "
            "for example kl: {estimator: k3, placement: loss, coef: 0.04}.",
        ),
        ("grpo", {"coef": -1}, "kl: coef must be a number of at least 0, not -1."),
        ("grpo", {"coef": True}, "kl: coef must be a number of at least 0, not True."),
        ("grpo", {"coef": "inf"}, "kl: coef must be a number of at least 0, not 'inf'."),
        ("grpo", {"coef": "much"}, "kl: coef must be a number, not 'much'."),
        ("grpo", {"coef": None}, "kl: coef must be a number, not None."),
        (
            "grpo",
            {"coef": 0, "estimator": "k9"},  # switched off, and still read
            "No kl_estimator named 'k9'. Did you mean 'k3'? Registered: "
            + ", ".join(f"{n} (trl-variants {__version__})" for n in ("abs", "k1", "k2", "k3"))
            + ".",
        ),
        (
            "rloo",
            {"weighted": True},
            "kl_placement 'sequence_reward' has no parameter 'weighted'. It has: nothing.",
        ),
        (
            "grpo",
            {"weighted": "sideways"},
            "kl_placement 'loss': weighted must be true or false or one of 'detached', not 'sideways'.",
        ),
        (
            "grpo",
            {"placement": "token_rewards"},
            "No kl_placement named 'token_rewards'. Did you mean 'token_reward'? Registered: "
            + ", ".join(f"{n} (trl-variants {__version__})" for n in ("loss", "sequence_reward", "token_reward"))
            + ".",
        ),
    ],
)
def test_kl_overrides_that_are_refused(variant: str, value: Any, expected: str) -> None:
    assert message(variant, {"kl": value}) == expected
