"""Variants: inheritance by name, empty slots, and components given as objects; whole error texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trl_variants import ClipResult, Variant, VariantError, component, hookimpl, resolve, use
from trl_variants.recipe import Recipe
from trl_variants.registry import Owner, load_registry
from trl_variants.resolution import flatten

REGISTRY = load_registry("none")


def of(variant: str | Variant, **overrides: Any) -> Recipe:
    return resolve(variant, overrides, REGISTRY)


def message(variant: str | Variant, overrides: Any = None, registry: Any = REGISTRY) -> str:
    with pytest.raises(VariantError) as error:
        resolve(variant, overrides, registry)
    return str(error.value)


# -- variants ---------------------------------------------------------------------------------------------------------


def registry_of(*variants: Variant) -> Any:
    registry = load_registry("none")
    hook = hookimpl(lambda: list(variants))
    registry.add(SimpleNamespace(register_variants=hook), Owner("a", "dist-a", "1.0"))
    return registry


def test_a_chain_of_extends_is_followed_to_the_end_and_the_nearest_wins() -> None:
    registry = registry_of(
        Variant(name="mine", extends="dapo", clip_rule=use("ppo_clip", epsilon_high=0.3), num_generations=16),
        Variant(name="child", extends="mine", loss_aggregator="seq_mean_token_mean"),
    )
    flat = flatten("child", registry)
    assert (flat.name, flat.extends, flat.num_generations, flat.num_iterations) == ("child", None, 16, 1)
    recipe = resolve("child", registry=registry)
    assert recipe.clip_rule.parameters["epsilon_high"] == 0.3  # mine
    assert recipe.loss_aggregator.name == "seq_mean_token_mean"  # child
    assert recipe.sample_filters[0].name == "zero_variance"  # dapo
    assert recipe.advantage_estimator.name == "group_mean"  # grpo, which dapo extends
    assert recipe.kl is None  # dapo switched grpo's off


def test_a_component_that_is_named_again_in_a_child_starts_from_its_defaults() -> None:
    child = Variant(name="x", extends="dapo", clip_rule="ppo_clip")
    assert of(child).clip_rule.parameters == {"epsilon_low": 0.2, "epsilon_high": 0.2}


def test_extends_that_lead_nowhere() -> None:
    assert message(Variant(name="x", extends="grpoo")).startswith("No variant named 'grpoo'. Did you mean 'grpo'? ")
    loop = registry_of(Variant(name="a", extends="b"), Variant(name="b", extends="a"), Variant(name="c", extends="c"))
    assert message("a", None, loop) == "variant 'a' extends itself: a -> b -> a."
    assert message("c", None, loop) == "variant 'c' extends itself: c -> c."
    assert resolve("grpo", registry=loop).variant.name == "grpo"  # a cycle elsewhere spoils nothing


def test_a_variant_with_an_empty_slot_is_refused() -> None:  # pains G06
    assert message(Variant(name="x")) == (
        "variant 'x' has no advantage_estimator. Set it, or let the variant extend one that has it."
    )
    bare = Variant(name="x", advantage_estimator="group_mean", importance_ratio="token", clip_rule="ppo_clip")
    assert message(bare) == "variant 'x' has no loss_aggregator. Set it, or let the variant extend one that has it."


def test_what_is_no_variant_is_refused() -> None:
    assert message(3) == "variant must be a name or a Variant, not int."  # type: ignore[arg-type]
    assert message(Variant(name="x", extends="grpo", kl=0.1)) == (  # type: ignore[arg-type]
        "kl of variant 'x' must be KL(...) or none, not 0.1."
    )
    assert message(Variant(name="x", extends="grpo", clip_rule=3)) == (  # type: ignore[arg-type]
        "clip_rule must be a name, a component or use(...), not 3."
    )


def test_every_registered_variant_resolves_and_rollout_correction_is_on_by_default() -> None:
    for name in REGISTRY.variants:
        recipe = of(name)
        assert [str(w) for w in recipe.token_weights] == [
            "rollout_correction(mode=sequence_mask, clip_max=3.0, clip_min=None)"
        ]


# -- components as objects --------------------------------------------------------------------------------------------


@component
def my_rule(log_ratio: Tensor, advantages: Tensor, *, factor: float = 1.0) -> ClipResult:
    return ClipResult(loss=-factor * log_ratio.exp() * advantages)


@component
def reads_nothing_here(log_ratio: Tensor, reward: Tensor) -> ClipResult:
    return ClipResult(loss=log_ratio)


def test_a_component_may_be_given_itself_and_is_owned_by_its_module() -> None:
    for variant, overrides in (
        (Variant(name="x", extends="dr_grpo", clip_rule=my_rule), {}),
        (Variant(name="x", extends="dr_grpo", clip_rule=use(my_rule, factor=1.0)), {}),
        ("dr_grpo", {"clip_rule": my_rule}),
        ("dr_grpo", {"clip_rule": {"name": my_rule, "factor": 1}}),
    ):
        bound = of(variant, **overrides).clip_rule
        assert (bound.name, str(bound.owner), dict(bound.parameters)) == ("my_rule", __name__, {"factor": 1.0})


def test_an_object_that_is_no_component_or_names_an_unknown_input_is_refused() -> None:
    assert message("grpo", {"clip_rule": torch.exp}).endswith(
        "is not a component. Put @component above its definition."
    )
    assert message("grpo", {"clip_rule": reads_nothing_here}).startswith(
        "clip_rule 'reads_nothing_here' names the input 'reward', which this slot does not have. It may name: log_ratio"
    )


def test_resolving_leaves_the_overrides_and_the_variant_as_they_were() -> None:
    overrides = {"clip_rule": {"name": "ppo_clip", "epsilon_low": 0.1}, "kl": {"coef": 0.1}}
    variant = REGISTRY.variant("grpo")
    before = repr((overrides, variant))
    resolve(variant, overrides, REGISTRY)
    assert repr((overrides, variant)) == before
