"""`trl-variants list`."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest

import trl_variants
from tests.cli.reading import HERE, PLUGIN, REGISTRY, data, error, out, table_of
from trl_variants.slots import SLOTS

pytestmark = pytest.mark.usefixtures("builtins_only")


def test_list_names_everything_that_is_registered() -> None:
    listed = data("list")
    assert list(listed) == ["variant", *SLOTS, "reward_function"]
    assert [entry["name"] for entry in listed["variant"]] == list(REGISTRY.variants)
    for slot in SLOTS:
        assert [entry["name"] for entry in listed[slot]] == list(REGISTRY.components(slot))
    words = out("list").split()
    assert {*REGISTRY.variants, *(name for slot in SLOTS for name in REGISTRY.components(slot))} <= set(words)


def test_list_says_of_a_component_what_can_be_set_and_where_it_is_from() -> None:
    (entry,) = [entry for entry in data("list", "--slot", "clip_rule")["clip_rule"] if entry["name"] == "dual_clip"]
    info = REGISTRY.component("clip_rule", "dual_clip").info
    assert entry == {
        "name": "dual_clip",
        "summary": info.summary,
        "parameters": {
            "epsilon_low": {"type": "float", "default": 0.2},
            "epsilon_high": {"type": "float", "default": 0.2},
            "c": {"type": "float", "default": 3.0},
        },
        "inputs": ["log_ratio", "advantages"],
        "min_generations": 1,
        "formula": info.formula,
        "paper": "https://arxiv.org/abs/1912.09729",
        "distribution": "trl-variants",
        "version": trl_variants.__version__,
        "problem": None,
    }


def test_list_of_one_slot_reads_as_text() -> None:
    assert out("list", "--slot", "kl_controller") == (
        "kl_controller  how the KL coefficient moves (one)\n"
        "  fixed     A constant coefficient.\n"
        "  adaptive  Steer the coefficient so that the KL stays near a target.\n"
        "            target=0.1, horizon=10000, level=token · arXiv:1909.08593\n"
        "\n"
        f"From {HERE}, unless another distribution is named.\n"
        "inputs  what a component here may name\n"
        "  kl_coef               the KL coefficient in force, a float\n"
        "  measured_kl           mean KL per policy token over the whole rollout, a float\n"
        "  measured_sequence_kl  mean over completions of the KL summed over tokens, a\n"
        "                        float\n"
        "  samples               the number of completions in the rollout, an int\n"
        "  state                 a dict of the component's own, saved in checkpoints\n"
        "\n"
        "It returns a scalar. N completions of the rollout, B of a micro-batch, T tokens,\n"
        "F reward functions.\n"
    )


def test_list_shows_the_parameter_that_a_slot_adds() -> None:
    assert "coef=1 · arXiv:1602.01783" in out("list", "--slot", "regularizer")


def test_list_of_one_slot_reads_as_markdown() -> None:
    text = out("list", "--slot", "kl_controller", "--markdown")
    assert text.startswith("## kl_controller\n\nHow the KL coefficient moves (one).\n\n| name |")
    assert table_of(text) == [
        ["name", "what it is", "parameters", "paper", "distribution"],
        ["`fixed`", "A constant coefficient.", "", "", HERE],
        [
            "`adaptive`",
            "Steer the coefficient so that the KL stays near a target.",
            "`target=0.1, horizon=10000, level=token`",
            "[arXiv:1909.08593](https://arxiv.org/abs/1909.08593)",
            HERE,
        ],
    ]


def test_a_bar_in_a_summary_does_not_end_a_cell() -> None:
    rows = {row[0]: row[1:] for row in table_of(out("list", "--slot", "clip_rule", "--markdown"))}
    assert rows["`dual_clip`"][0].endswith(r"c \|A\|).")
    assert {len(cells) for cells in rows.values()} == {4}


def test_list_names_the_distribution_of_what_is_not_built_in(plugin: str) -> None:
    text = out("list", "--slot", "clip_rule", "--plugins", plugin, columns=200)
    assert f"tau=0.5 · example.org/a/long/address/of/a/paper · {plugin}\n" in text
    assert text.count(plugin) == 1 and text.count(HERE) == 1


def test_list_knows_reward_functions_and_trls_own(plugin: str) -> None:
    entries = data("list", "--slot", "reward_function", "--plugins", plugin)["reward_function"]
    found = {entry["name"]: (entry["summary"], entry["distribution"], entry["version"]) for entry in entries}
    assert found["length_reward"] == ("Longer is better.", plugin, None)
    assert found["accuracy_reward"][1:] == ("trl", version("trl"))
    assert set(found) == {"length_reward", "accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"}
    assert "accuracy_reward" in out("list", "--slot", "reward_function")


def test_list_marks_a_name_that_two_plugins_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def __init__(self, name: str) -> None:
            self.name, self.dist = name, None

        def load(self) -> object:
            module = type(sys)(self.name)
            exec(PLUGIN, module.__dict__)
            return module

    monkeypatch.setenv("TRL_VARIANTS_PLUGINS", "auto")
    monkeypatch.setattr("trl_variants.discovery.metadata.entry_points", lambda group: [Point("one"), Point("two")])
    problem = "clip_rule 'soft_clip' is registered by both one and two."
    assert data("list", "--slot", "clip_rule")["clip_rule"][-1]["problem"] == problem
    assert problem in " ".join(out("list", "--slot", "clip_rule").split())
    assert problem in out("list", "--slot", "clip_rule", "--markdown")


def test_an_unknown_slot_is_refused_with_the_nearest() -> None:
    assert error("list", "--slot", "clip_rul") == (
        "Error: There is no slot 'clip_rul'. Did you mean 'clip_rule'? Slots: variant, sample_filter, reward_shaper, "
        "kl_estimator, kl_placement, kl_controller, advantage_estimator, advantage_normalizer, importance_ratio, "
        "clip_rule, token_weight, regularizer, loss_aggregator, reward_function."
    )


def test_list_of_one_slot_says_what_a_component_there_may_name_and_return() -> None:
    printed = out("list", "--slot", "importance_ratio")
    assert "old_log_probs  (B, T) log pi of the policy at the rollout" in printed
    assert "It returns (B, T) or (B, 1)." in printed
    assert "It returns (N,)." in out("list", "--slot", "sample_filter")
