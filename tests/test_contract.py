"""The contract over every registered component and variant, and proof that the kit catches what breaks it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from trl_variants import VariantError, load_registry, resolve
from trl_variants.conformance.inputs import Case
from trl_variants.slots import LEARNING_INPUTS, ROLLOUT_INPUTS, SLOTS
from trl_variants.testing import check_component, check_variant, make_rollout

REGISTRY = load_registry("none")
COMPONENTS = [(slot, name) for slot in SLOTS for name in REGISTRY.components(slot)]
#: Components whose result depends by definition on how a step is cut into micro-batches.
BATCH_STATISTICS = {("loss_aggregator", "token_mean_local")}
#: TRL leaves the rounding error of a constant group: 6e-4 at 0.7 eight times, in float32.
TRL_ROUNDING = {"trl_grpo", "trl_dapo", "trl_dr_grpo", "trl_bnpo", "trl_cispo", "trl_gspo", "trl_rloo"}
#: Parameters other than the defaults under which a component must keep the contract as well.
SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("reward_shaper", "whiten_rewards", {"keep_mean": True, "correction": 1}),
    ("reward_shaper", "whiten_token_rewards", {"keep_mean": False, "correction": 0}),
    ("kl_placement", "loss", {"weighted": True}),
    ("kl_placement", "loss", {"weighted": "detached"}),
    ("kl_controller", "adaptive", {"level": "sequence", "target": 6.0}),
    ("advantage_estimator", "gae", {"bootstrap_truncated": True, "gamma": 0.9}),
    ("advantage_estimator", "reward_to_go", {"gamma": 0.5}),
    ("advantage_normalizer", "group_std", {"correction": 1, "eps": 0.0}),
    ("advantage_normalizer", "batch_std", {"level": "completion", "correction": 1}),
    ("advantage_normalizer", "batch_std", {"center": False}),
    *(
        ("token_weight", "rollout_correction", {"mode": mode, "clip_min": 0.5, "clip_max": 2.0})
        for mode in ("token_truncate", "token_mask", "sequence_truncate")
    ),
    ("regularizer", "adaptive_entropy", {"start": 0.5, "target": 5.0}),
    ("regularizer", "value_loss", {"clip": None}),
    ("loss_aggregator", "seq_mean_token_mean", {"count_empty": True}),
    ("loss_aggregator", "seq_mean_token_sum_norm", {"count_empty": True, "constant": 3}),
]


@pytest.mark.parametrize(("slot", "name"), COMPONENTS)
def test_every_component_keeps_the_contract(slot: str, name: str) -> None:  # pains A14, C09, F12, F13
    info = REGISTRY.component(slot, name).info
    held = check_component(slot, name, registry=REGISTRY)
    phases = {"rollout", "learning"} if slot == "kl_estimator" else {SLOTS[slot].phase}
    if slot == "kl_placement":
        phases = {"learning" if "per_token_loss" in info.inputs else "rollout"}
    exact = "learning" in phases and (slot, name) not in BATCH_STATISTICS
    assert ("the_cut_changes_no_gradient" in held) == exact
    assert ("unscored_rows_count_for_nothing" in held) == ("rollout" in phases)
    on_policy = slot in ("clip_rule", "importance_ratio", "loss_aggregator")
    assert ("the_gradient_on_policy_is_minus_the_advantage" in held) == on_policy
    assert ("clips_are_reported_where_they_bind" in held) == (slot == "clip_rule")
    assert ("a_kl_is_a_divergence" in held) == (slot == "kl_estimator")
    assert ("constant_groups_get_zero" in held) == info.centres_groups()
    assert len(held) >= 5


@pytest.mark.parametrize(("slot", "name", "parameters"), SETTINGS)
def test_components_keep_the_contract_under_other_parameters(slot: str, name: str, parameters: dict) -> None:
    # One parameter may take another's effect away: that each acts is shown at the defaults.
    held = check_component(slot, name, parameters=parameters, registry=REGISTRY, excepted=["every_parameter_acts"])
    assert len(held) >= 5


@pytest.mark.parametrize("name", REGISTRY.variants)
def test_every_variant_keeps_the_contract(name: str) -> None:
    held = check_variant(name, REGISTRY)
    local = resolve(name, registry=REGISTRY).loss_aggregator.info.batch_statistic
    assert ("the_cut_changes_no_gradient" in held) == (not local)


@pytest.mark.parametrize("name", sorted(TRL_ROUNDING))
def test_trls_variants_keep_the_rounding_error_of_constant_groups(name: str) -> None:
    recipe = resolve(name, registry=REGISTRY)
    same = torch.zeros(8, 1)
    constants = (make_rollout(torch.full((8,), value), log_probs=same, ref_log_probs=same) for value in (0.1, 0.7))
    largest = max(float(recipe.advantages(rollout).advantages.abs().max()) for rollout in constants)
    assert 1e-9 < largest < 1e-3


def test_the_components_that_depend_on_the_cut_are_listed_here() -> None:
    declared = {(s, n) for s, n in COMPONENTS if REGISTRY.component(s, n).info.batch_statistic}
    assert declared == BATCH_STATISTICS


# -- parameters and inputs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slot", "name"), COMPONENTS)
def test_parameters_of_the_wrong_type_or_name_are_refused_naming_component_and_key(slot: str, name: str) -> None:
    info = REGISTRY.component(slot, name).info
    extra = SLOTS[slot].parameters
    for key in (*info.parameters, *extra):
        with pytest.raises(VariantError, match=f"^{slot} '{name}': {key} must be .*, not {{'a': 1}}.$"):
            info.bind(slot, {key: {"a": 1}}, extra)
    with pytest.raises(VariantError, match=f"^{slot} '{name}' has no parameter 'no_such_key'."):
        info.bind(slot, {"no_such_key": 1}, extra)
    defaults = info.bind(slot, {}, extra)
    assert info.bind(slot, defaults, extra) == defaults  # defaults are valid, and survive a round trip


@pytest.mark.parametrize(("slot", "name"), COMPONENTS)
def test_what_a_component_takes_is_documented(slot: str, name: str) -> None:
    info = REGISTRY.component(slot, name).info
    text = inspect.getdoc(info.function) or ""
    assert info.summary
    for key in (*info.inputs, *info.parameters):
        assert f"\n    {key}: " in text, key


@pytest.mark.parametrize("slot", SLOTS)
def test_the_kit_makes_every_input_that_a_slot_offers(slot: str) -> None:
    missing = set(SLOTS[slot].inputs) - Case((2, 2), 3).inputs(slot).keys()
    assert not missing
    assert set(SLOTS[slot].inputs) <= {*ROLLOUT_INPUTS, *LEARNING_INPUTS}
