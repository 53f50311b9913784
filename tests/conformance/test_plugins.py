"""Whole plugins are held to the contract, and verdicts say what they were held to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.conformance.broken_in_rollout import mean_with_the_unscored
from trl_variants import KL, Variant, VariantError, component, hookimpl
from trl_variants.testing import NonConformance, check_component, check_plugin, check_variant, make_rollout


@component(group_centred=True, min_generations=2)
def median_centred(rewards: Tensor, scored: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards minus the median of the group's scored ones."""
    out = torch.zeros_like(rewards)
    for group in group_ids.unique():
        mine = scored & (group_ids == group)
        if mine.any():
            out[mine] = rewards[mine] - rewards[mine].median()
    return out


def plugin_of(**hooks: Callable[[], list]) -> SimpleNamespace:
    return SimpleNamespace(__name__="a_plugin", **{name: hookimpl(hook) for name, hook in hooks.items()})


def test_a_sound_plugin_passes_whole_and_is_told_what_it_was_held_to() -> None:
    def register_advantage_estimators() -> list:
        return [median_centred]

    def register_variants() -> list:
        return [
            Variant(name="median", extends="dapo", advantage_estimator="median_centred"),
            Variant(name="median_kl", extends="median", kl=KL("k3", placement="loss", coef=0.1)),
        ]

    plugin = plugin_of(register_advantage_estimators=register_advantage_estimators, register_variants=register_variants)
    held = check_plugin(plugin)
    assert set(held) == {"advantage_estimator.median_centred", "variant.median", "variant.median_kl"}
    assert all("constant_groups_get_zero" in properties for properties in held.values())


def test_a_plugin_with_one_broken_component_fails() -> None:
    def register_advantage_estimators() -> list:
        return [median_centred, mean_with_the_unscored]

    with pytest.raises(NonConformance, match="mean_with_the_unscored"):
        check_plugin(plugin_of(register_advantage_estimators=register_advantage_estimators))


def test_lists_become_float64_exactly() -> None:
    assert make_rollout([0.1, 0.7]).rewards.tolist() == [0.1, 0.7]
    assert make_rollout([1.0], values=[[0.1]]).values.tolist() == [[0.1]]


def test_a_verdict_says_what_excepts_a_component_from_the_contract() -> None:
    local = check_component("loss_aggregator", "token_mean_local", excepted=["every_parameter_acts"])
    assert local.exceptions == {
        "the_cut_changes_no_gradient": "token_mean_local is declared batch_statistic",
        "ranks_change_nothing": "token_mean_local is declared batch_statistic, and gathers nothing",
        "every_parameter_acts": "excepted by the caller",
    }
    gspo = check_variant("gspo")
    assert [*gspo.exceptions] == ["the_gradient_on_policy_is_minus_the_advantage"]


def test_a_statistic_that_gathers_is_held_to_ranks() -> None:
    @component(batch_statistic=True)
    def centred_entropy(entropies: Tensor, mask: Tensor, gather: Callable) -> Tensor:
        sums = torch.stack([torch.where(mask, entropies, 0.0).sum(), mask.sum()]).detach()
        total, tokens = gather(sums[None]).sum(0)
        return entropies - total / tokens

    verdict = check_component("regularizer", centred_entropy)
    assert "ranks_change_nothing" in verdict and "the_cut_changes_no_gradient" in verdict.exceptions


def test_a_plugin_that_is_not_installed_is_named_with_the_nearest() -> None:
    with pytest.raises(VariantError, match="No installed plugin or distribution of plugins named 'no-such-plugin'"):
        check_plugin("no-such-plugin")
