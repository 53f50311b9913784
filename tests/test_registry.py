"""The registry: what is registered, who owns it, and plugins taken whole or not at all. Whole error texts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

import trl_variants.builtins
from trl_variants import Variant, VariantError, __version__, component, hookimpl, load_registry
from trl_variants.registry import Owner, Registry
from trl_variants.slots import SLOTS


def error_of(call: Callable, *arguments: object, **named: object) -> VariantError:
    with pytest.raises(VariantError) as error:
        call(*arguments, **named)
    return error.value


def plugin(**hooks: Callable) -> SimpleNamespace:
    return SimpleNamespace(**{name: hookimpl(hook) for name, hook in hooks.items()})


def rule(name: str, factor: float = 1.0) -> Callable:
    @component(name=name)
    def made(log_ratio, advantages):
        return factor * log_ratio * advantages

    return made


A, B = Owner("a", "dist-a", "1.0"), Owner("b", "dist-b", "2.0")

# -- built-ins --------------------------------------------------------------------------------------------------------


def test_built_ins_are_registered_through_the_same_hooks_and_owned_by_the_package() -> None:
    registry = load_registry("none")
    assert all(registry.components(slot) for slot in SLOTS)
    assert str(registry.owner("clip_rule", "ppo_clip")) == f"trl-variants {__version__}"
    assert str(registry.owner("variant", "grpo")) == f"trl-variants {__version__}"
    assert [owner.plugin for owner in registry.plugins] == ["builtins"]
    assert registry.broken == []


def test_mappings_cannot_be_written_to() -> None:
    registry = load_registry("none")
    for mapping in (registry.variants, registry.components("clip_rule"), registry.reward_functions):
        with pytest.raises(TypeError):
            mapping["x"] = None


def test_unknown_names_get_the_nearest_and_all_that_exist() -> None:
    registry = load_registry("none")
    listed = ", ".join(f"{n} (trl-variants {__version__})" for n in sorted(registry.components("clip_rule")))
    assert str(error_of(registry.component, "clip_rule", "ppo_clp")) == (
        f"No clip_rule named 'ppo_clp'. Did you mean 'ppo_clip'? Registered: {listed}."
    )
    assert str(error_of(registry.component, "clip_rule", "token_mean")) == (
        f"No clip_rule named 'token_mean'. 'token_mean' is a loss_aggregator. Registered: {listed}."
    )
    assert str(error_of(registry.component, "clip_rule", "zzz")) == f"No clip_rule named 'zzz'. Registered: {listed}."
    listed = ", ".join(f"{name} (trl-variants {__version__})" for name in sorted(registry.variants))
    assert str(error_of(registry.variant, "dappo")) == (
        f"No variant named 'dappo'. Did you mean 'dapo'? Registered: {listed}."
    )
    assert str(error_of(registry.components, "clip_rul")) == (
        f"There is no slot 'clip_rul'. Did you mean 'clip_rule'? Slots: {', '.join(SLOTS)}."
    )


# -- one plugin -------------------------------------------------------------------------------------------------------


def test_the_same_objects_again_are_a_no_op() -> None:
    registry = load_registry("none")
    before = (dict(registry.variants), dict(registry.components("clip_rule")), list(registry.plugins))
    registry.add(trl_variants.builtins, registry.plugins[0])
    assert (dict(registry.variants), dict(registry.components("clip_rule")), list(registry.plugins)) == before


def test_the_same_plugin_again_is_a_no_op_though_its_hook_makes_its_components_anew() -> None:
    registry = load_registry("none")
    anew = plugin(register_clip_rules=lambda: [rule("mine")])
    registry.add(anew, A)
    first = registry.component("clip_rule", "mine").info
    registry.add(anew, A)
    assert registry.component("clip_rule", "mine").info is first and registry.plugins.count(A) == 1


def test_a_name_that_is_taken_is_an_error_naming_both_owners() -> None:  # pains G08
    registry = load_registry("none")
    registry.add(plugin(register_clip_rules=lambda: [rule("mine")]), A)
    for owner, name, first in (
        (B, "mine", "dist-a 1.0"),
        (B, "ppo_clip", f"trl-variants {__version__}"),
    ):
        error = error_of(registry.add, plugin(register_clip_rules=lambda name=name: [rule(name)]), owner)
        assert str(error) == f"clip_rule '{name}' is registered by both {first} and dist-b 2.0."
    variant = plugin(register_variants=lambda: [Variant(name="grpo", extends="dapo")])
    assert str(error_of(registry.add, variant, B)) == (
        f"variant 'grpo' is registered by both trl-variants {__version__} and dist-b 2.0."
    )
    registry.add(plugin(register_reward_functions=lambda: [len]), A)
    taken = type("F", (), {"__name__": "len", "__call__": lambda self: 0})()
    assert str(error_of(registry.add, plugin(register_reward_functions=lambda: [taken]), B)) == (
        "reward_function 'len' is registered by both dist-a 1.0 and dist-b 2.0."
    )


def test_the_same_name_in_two_slots_is_no_clash() -> None:
    registry = load_registry("none")

    @component(name="token")
    def made(log_ratio, advantages):
        return log_ratio

    registry.add(plugin(register_clip_rules=lambda: [made]), A)
    assert registry.component("clip_rule", "token").owner == A
    assert registry.component("importance_ratio", "token").owner.distribution == "trl-variants"


def test_one_plugin_may_not_use_a_name_twice() -> None:
    registry = load_registry("none")
    twice = plugin(register_clip_rules=lambda: [rule("mine"), rule("mine", 2.0)])
    assert str(error_of(registry.add, twice, A)) == (
        "clip_rule 'mine' is registered by both dist-a 1.0 and dist-a 1.0."
    )
    assert "mine" not in registry.components("clip_rule")


def test_an_equal_variant_is_the_same_variant() -> None:
    registry = load_registry("none")
    for owner in (A, B):
        registry.add(plugin(register_variants=lambda: [Variant(name="mine", extends="dapo")]), owner)
    assert registry.owner("variant", "mine") == A


def test_a_plugin_is_taken_whole_or_not_at_all() -> None:
    registry = load_registry("none")
    half = plugin(
        register_clip_rules=lambda: [rule("fine")],
        register_variants=lambda: [Variant(name="fine", extends="grpo"), Variant(name="grpo")],
    )
    error_of(registry.add, half, A)
    broken = plugin(register_clip_rules=lambda: [rule("fine")], register_variants=lambda: ["grpo"])
    error_of(registry.add, broken, A)
    assert "fine" not in registry.components("clip_rule")
    assert "fine" not in registry.variants
    assert A not in registry.plugins


def not_marked() -> list:
    return []


def raises() -> list:
    raise RuntimeError("boom")


@component
def wrong_input(log_ratio, advantage):
    return log_ratio


@component
def taken_parameter(entropies, *, coef: float = 1.0):
    return entropies


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            plugin(register_clip_rule=lambda: []),
            "dist-a 1.0: there is no hook 'register_clip_rule'. Did you mean 'register_clip_rules'?",
        ),
        (  # pains G04: a marked function of another name, beside a valid hook
            plugin(register_clip_rules=lambda: [], compute_advantage=lambda: []),
            "dist-a 1.0: there is no hook 'compute_advantage'. Did you mean 'register_advantage_estimators'?",
        ),
        (SimpleNamespace(), "dist-a 1.0 registers nothing: it has no function marked with @hookimpl."),
        (
            plugin(register_clip_rules=lambda: None),
            "dist-a 1.0: register_clip_rules returned NoneType; it must return a list.",
        ),
        (
            plugin(register_clip_rules=lambda: "ppo_clip"),
            "dist-a 1.0: register_clip_rules returned str; it must return a list.",
        ),
        (
            plugin(register_clip_rules=lambda: [not_marked]),
            f"dist-a 1.0: register_clip_rules: {not_marked!r} is not a component. Put @component above its definition.",
        ),
        (
            plugin(register_variants=lambda: ["grpo"]),
            "dist-a 1.0: register_variants returned 'grpo', which is not a Variant.",
        ),
        (
            plugin(register_reward_functions=lambda: [3]),
            "dist-a 1.0: register_reward_functions returned 3, which is not a reward function.",
        ),
        (
            plugin(register_kl_estimators=lambda: [wrong_input]),
            "dist-a 1.0: register_kl_estimators: kl_estimator 'wrong_input' names the input 'log_ratio', which this "
            "slot does not have. Did you mean 'log_probs'? It may name: log_probs, ref_log_probs.",
        ),
        (
            plugin(register_regularizers=lambda: [taken_parameter]),
            "dist-a 1.0: register_regularizers: regularizer 'taken_parameter' has a parameter 'coef', which the slot "
            "itself adds.",
        ),
    ],
)
def test_a_plugin_that_is_wrong_is_told_what_and_where(made: object, message: str) -> None:
    assert str(error_of(Registry().add, made, A)) == message
