"""What a recipe is, for people and for files."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor

import trl_variants
from trl_variants import KL, ClipResult, Variant, component, resolve, use
from trl_variants.describe import PARTS, Model, models, needs, plain, recipe_dict, slots_of, table_row
from trl_variants.registry import load_registry
from trl_variants.slots import SLOTS

REGISTRY = load_registry("none")
VARIANTS = sorted(REGISTRY.variants)


def recipe(name: str, overrides: dict[str, Any] | None = None) -> trl_variants.Recipe:
    return resolve(name, overrides, REGISTRY)


@component(paper="https://example.org/paper", formula="x")
def own_rule(log_probs: torch.Tensor, *, shapes: Any = (1, (2, None)), kind: Any = complex(0, 1)) -> ClipResult:
    return ClipResult(loss=log_probs)


OWN = Variant(name="own", extends="reinforce", clip_rule=own_rule, num_generations=4)


# -- recipe_dict -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_the_dict_of_every_variant_survives_json_and_names_every_slot(name: str) -> None:
    data = recipe_dict(recipe(name))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert {*data["slots"], "kl_estimator", "kl_placement", "kl_controller"} == set(SLOTS)
    for slot, value in data["slots"].items():
        assert isinstance(value, list if SLOTS[slot].many else dict), slot


@pytest.mark.parametrize("name", VARIANTS)
def test_the_dict_says_everything_that_resolving_again_needs(name: str) -> None:
    """Its slots, given as overrides of another variant, make the same recipe."""
    data = recipe_dict(recipe(name))

    def override(entry: dict[str, Any]) -> dict[str, Any]:
        return {"name": entry["component"], **entry["parameters"]}

    overrides: dict[str, Any] = {
        slot: [override(entry) for entry in value] if isinstance(value, list) else override(value)
        for slot, value in data["slots"].items()
    }
    overrides["kl"] = data["kl"] and {
        "coef": data["kl"]["coef"],
        **{part: override(data["kl"][part]) for part in ("estimator", "placement", "controller")},
    }
    overrides["critic"] = data["settings"]["critic"]
    again = recipe_dict(resolve(Variant(name="bare", extends="reinforce"), overrides, REGISTRY))
    assert (again["slots"], again["kl"]) == (data["slots"], data["kl"])


def test_a_component_is_recorded_with_all_its_parameters_its_function_and_its_owner() -> None:
    data = recipe_dict(recipe("dapo", {"clip_rule": {"epsilon_high": "3e-1"}}))
    assert data["slots"]["clip_rule"] == {
        "component": "ppo_clip",
        "parameters": {"epsilon_low": 0.2, "epsilon_high": 0.3},
        "function": "trl_variants.components.clip_rules.ppo_clip",
        "distribution": "trl-variants",
        "version": trl_variants.__version__,
        "paper": "https://arxiv.org/abs/1707.06347",
    }
    assert data["variant"] == "dapo"
    assert data["paper"] == "https://arxiv.org/abs/2503.14476"
    assert data["kl"] is None


def test_kl_is_recorded_with_its_coefficient_and_its_three_components() -> None:
    kl = recipe_dict(recipe("grpo", {"kl": {"weighted": True}}))["kl"]
    assert kl["coef"] == 0.04
    assert [kl[part]["component"] for part in ("estimator", "placement", "controller")] == ["k3", "loss", "fixed"]
    assert kl["placement"]["parameters"] == {"weighted": True}


def test_an_object_handed_over_is_recorded_by_module_and_name() -> None:
    data = recipe_dict(resolve(OWN, registry=REGISTRY))
    entry = data["slots"]["clip_rule"]
    assert entry["function"] == f"{__name__}.own_rule"
    assert (entry["distribution"], entry["version"]) == (__name__, None)
    assert entry["parameters"] == {"shapes": [1, [2, None]], "kind": "1j"}
    assert data["settings"] == {
        "num_generations": 4,
        "num_iterations": 1,
        "max_updates_per_rollout": 1,
        "critic": None,
        "reshuffle": False,
        "sampling": "mask",
    }


def test_versions_are_those_of_the_packages_that_train() -> None:
    versions = recipe_dict(recipe("grpo"))["versions"]
    assert versions["trl-variants"] == trl_variants.__version__
    assert {name: versions[name] for name in ("trl", "torch")} == {n: metadata.version(n) for n in ("trl", "torch")}


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("trl_variants.describe.metadata.version", missing)
    assert set(recipe_dict(recipe("grpo"))["versions"]) == {"python", "trl-variants"}


@pytest.mark.parametrize(
    ("value", "written"),
    [(float("inf"), "inf"), ({1: (2.5, None)}, {"1": [2.5, None]}), (True, True), (torch.float32, "torch.float32")],
)
def test_any_value_becomes_plain_data(value: Any, written: Any) -> None:
    assert plain(value) == written


def test_slots_keep_the_order_of_a_list_and_are_empty_where_nothing_is() -> None:
    filled = slots_of(recipe("dapo", {"reward_shaper": ["clip_rewards", "soft_overlong"]}))
    assert list(filled) == list(SLOTS)
    assert [bound.name for bound in filled["reward_shaper"]] == ["clip_rewards", "soft_overlong"]
    assert filled["kl_estimator"] == filled["regularizer"] == ()


# -- models ----------------------------------------------------------------------------------------

POLICY = Model("policy", True, "generates the completions and learns from them")
#: The advantage that a critic serves, and the loss that trains it.
WITH_CRITIC = {"advantage_estimator": "gae", "regularizer": "value_loss"}


def test_grpo_keeps_the_policy_and_a_frozen_reference() -> None:
    assert models(recipe("grpo")) == [POLICY, Model("reference", False, "the policy as it was at the start, for k3")]


def test_without_kl_the_policy_is_alone() -> None:
    assert models(recipe("dapo")) == [POLICY]


def test_a_reward_model_is_one_more_frozen_model() -> None:
    assert models(recipe("dapo"), reward_model=True)[1:] == [Model("reward model", False, "scores the completions")]


@pytest.mark.parametrize(
    ("critic", "where"), [("separate", "a model of its own"), ("shared", "a head on the policy's backbone")]
)
def test_ppo_keeps_four_models_and_trains_two(critic: str, where: str) -> None:
    overrides = {"critic": critic, "kl": {"estimator": "k1", "placement": "token_reward"}, **WITH_CRITIC}
    resident = models(recipe("grpo", overrides), reward_model=True)
    assert [model.describe() for model in resident] == [
        "policy (trained)",
        "critic (trained)",
        "reference (frozen)",
        "reward model (frozen)",
    ]
    assert resident[1].reason == f"{where}; the values that gae and value_loss read"


@component
def reference_term(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs - ref_log_probs


def test_a_reference_that_a_term_other_than_kl_reads_is_resident_for_it() -> None:
    variant = Variant(name="own", extends="dapo", regularizer=reference_term)
    assert models(resolve(variant, registry=REGISTRY))[1].reason == (
        "the policy as it was at the start, for reference_term"
    )


# -- needs -----------------------------------------------------------------------------------------

CORRECTION = "rollout_correction acts only where the generation engine returns log-probs, as vLLM does."


def test_needs_of_rloo() -> None:
    assert needs(recipe("rloo")) == [
        "At least 2 completions per prompt (num_generations), for leave_one_out.",
        "At most one optimizer step per rollout; more is refused.",
        "Scores every rollout once more before learning, for its log-probs.",
        CORRECTION,
    ]


def test_needs_of_a_variant_for_single_completions() -> None:
    assert needs(recipe("reinforce", {"token_weight": "none"})) == [
        "One completion per prompt is enough (num_generations: 1).",
        "At most one optimizer step per rollout; more is refused.",
    ]


def test_proposals_and_demands_are_said() -> None:
    variant = Variant(
        name="own",
        extends="dapo",
        num_generations=16,
        num_iterations=4,
        max_updates_per_rollout=8,
        regularizer="entropy_bonus",
        loss_aggregator="token_mean_local",
    )
    said = needs(resolve(variant, {"sampling": "mask"}, REGISTRY))
    assert said == [
        "At least 2 completions per prompt (num_generations), for zero_variance, group_mean, group_std.",
        "Proposes num_generations: 16; yours wins.",
        "Proposes num_iterations: 4, epochs over each rollout; yours wins.",
        "At most 8 optimizer steps per rollout; more is refused.",
        "The entropy of every token, with gradient, for entropy_bonus.",
        "Rows that the filter drops are masked, not replaced by new ones (sampling: mask).",
        CORRECTION,
        "token_mean_local depends on how a step is cut into micro-batches.",
    ]
    said[5] = "Draws further prompts for groups that the filter drops, up to max_rounds (sampling: resample)."
    assert needs(resolve(variant, registry=REGISTRY)) == said


def test_a_rule_that_falls_back_on_the_policy_at_the_rollout_is_not_said_to_do_nothing() -> None:
    @component
    def drift(log_probs: Tensor, old_log_probs: Tensor, sampling_log_probs: Tensor | None = None) -> Tensor:
        drawn_by = old_log_probs if sampling_log_probs is None else sampling_log_probs
        return (log_probs - drawn_by < 1).to(log_probs.dtype)

    assert needs(resolve(Variant(name="own", extends="reinforce", token_weight=drift), registry=REGISTRY))[-1] == (
        "drift compares the policy with the generation engine's where it returns log-probs, as vLLM does; elsewhere "
        "with the policy at the rollout."
    )


# -- the table -------------------------------------------------------------------------------------

#: Columns of the specification's table: baseline, scaling, ratio, clip, aggregation, kl, besides the token weight.
EXPECTED = {
    "reinforce": (
        "returns baseline=0", "none", "none", "policy_gradient", "seq_mean_token_sum", "none",
        ["G ≥ 1", "1 update per rollout"],
    ),
    "grpo": (
        "group_mean", "group_std", "token", "ppo_clip 0.2", "seq_mean_token_mean", "k3 in loss, β 0.04", ["G ≥ 2"],
    ),
    "rloo": (
        "leave_one_out", "none", "none", "policy_gradient", "seq_mean_token_sum", "k1 in sequence reward, β 0.05",
        ["G ≥ 2", "1 update per rollout"],
    ),
    "reinforce_pp": (
        "reward_to_go gamma=1", "batch_std", "token", "ppo_clip 0.2", "token_mean", "k1 in token reward, β 0.01",
        ["G ≥ 1"],
    ),
    "reinforce_pp_baseline": (
        "group_mean", "batch_std", "token", "ppo_clip 0.2", "token_mean", "k2 in loss, β 0.001", ["G ≥ 2"],
    ),
    "dr_grpo": ("group_mean", "none", "token", "ppo_clip 0.2", "seq_mean_token_sum_norm", "none", ["G ≥ 2"]),
    "gspo": ("group_mean", "group_std", "sequence", "ppo_clip 3e-4/4e-4", "seq_mean_token_mean", "none", ["G ≥ 2"]),
    "gspo_token": (
        "group_mean", "group_std", "sequence_token", "ppo_clip 3e-4/4e-4", "seq_mean_token_mean", "none", ["G ≥ 2"],
    ),
    "cispo": ("group_mean", "group_std", "token", "cispo 5", "token_mean", "none", ["G ≥ 2"]),
    "trl_grpo": (
        "group_mean zero_constant=false", "group_std correction=1 eps=1e-4 zero_constant=false", "token",
        "ppo_clip 0.2", "seq_mean_token_mean count_empty=true", "ρ·k3 in loss, β 0.04", ["G ≥ 2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_the_row_of_a_variant_is_that_of_the_specification(name: str) -> None:
    *six, besides = EXPECTED[name]
    row = table_row(recipe(name))
    assert [row[part] for part in PARTS[:-1]] == six
    assert row["besides"].split("; ") == ["weight rollout_correction", *besides]


def test_what_surrounds_dapo_is_its_filter_and_its_shaper() -> None:
    row = table_row(recipe("dapo"))
    assert (row["clip"], row["aggregation"], row["kl"]) == ("ppo_clip 0.2/0.28", "token_mean", "none")
    assert row["besides"] == "filter zero_variance; reward soft_overlong; weight rollout_correction; G ≥ 2"


def test_everything_besides_is_named_in_the_row() -> None:
    variant = Variant(
        name="own",
        extends="reinforce",
        reward_shaper=use("missing_eos_penalty", penalty=2.0),
        token_weight="none",
        critic="shared",
        advantage_estimator="gae",
        regularizer=[use("entropy_bonus", coef=0.01), use("value_loss", coef=0.1)],
        num_generations=8,
        num_iterations=4,
        max_updates_per_rollout=2,
    )
    row = table_row(resolve(variant, registry=REGISTRY))
    assert row["baseline"] == "gae gamma=1 lam=0.95"
    assert row["besides"].split("; ") == [
        "reward missing_eos_penalty penalty=2",
        "loss term entropy_bonus coef=0.01",
        "loss term value_loss coef=0.1",
        "critic shared",
        "G ≥ 1",
        "G = 8",
        "4 epochs",
        "2 updates per rollout",
    ]


@pytest.mark.parametrize(
    ("kl", "written"),
    [
        (KL("k3", placement="loss", coef=1e-4, weighted="detached"), "sg[ρ]·k3 in loss, β 1e-4"),
        (
            KL("k1", placement="token_reward", coef=0.2, controller=use("adaptive", target=6.0)),
            "k1 in token reward, β 0.2, adaptive target=6 horizon=10000",
        ),
        (KL("abs", placement="sequence_reward", coef=1.0), "abs in sequence reward, β 1"),
    ],
)
def test_kl_is_written_with_what_matters(kl: KL, written: str) -> None:
    assert table_row(resolve(Variant(name="own", extends="grpo", kl=kl), registry=REGISTRY))["kl"] == written


def test_a_second_bound_is_named_beside_the_first() -> None:
    overrides = {"clip_rule": {"name": "dual_clip", "epsilon_low": 0.1}}
    assert table_row(recipe("grpo", overrides))["clip"] == "dual_clip 0.1/0.2 c=3"
