"""`trl-variants diff`."""

from __future__ import annotations

import re

import pytest

from tests.cli.reading import REGISTRY, data, out, table_of
from trl_variants.describe import recipe_dict
from trl_variants.resolution import resolve

pytestmark = pytest.mark.usefixtures("builtins_only")


def test_diff_shows_only_what_differs() -> None:
    text = out("diff", "grpo", "dapo", columns=100)
    rows = [re.split(r" {2,}", line) for line in text.split("\n")[2:]]
    assert rows[: rows.index([""])] == [
        ["sample_filter", "none", "zero_variance reward=null"],
        ["reward_shaper", "none", "soft_overlong cache=null"],
        ["kl", "k3 in loss, β 0.04", "none"],
        ["clip_rule", "ppo_clip epsilon_high=0.2", "ppo_clip epsilon_high=0.28"],
        ["loss_aggregator", "seq_mean_token_mean count_empty=false", "token_mean"],
        ["sampling", "mask", "resample"],
        ["models", "policy (trained), reference (frozen)", "policy (trained)"],
    ]
    assert " ".join(text.split()).endswith(
        "The same: advantage_estimator, advantage_normalizer, importance_ratio, token_weight, regularizer, "
        "num_generations, num_iterations, max_updates_per_rollout, critic, reshuffle, least generations."
    )


def test_diff_of_two_kls_compares_their_parts() -> None:
    text = out("diff", "grpo", "reinforce_pp", columns=120)
    rows = {line.split()[0]: line.split()[1:] for line in text.split("\n") if line and not line.startswith(" ")}
    assert rows["kl_estimator"] == ["k3", "k1"]
    assert rows["kl_placement"] == ["loss", "weighted=false", "token_reward"]
    assert "kl_controller" not in rows
    assert re.search(r"^kl coef +0.04 +0.01$", text, re.MULTILINE)
    assert re.search(r"^least generations +2 +1$", text, re.MULTILINE)


def test_diff_all_shows_the_rest_too() -> None:
    text = out("diff", "grpo", "dapo", "--all", columns=100)
    assert re.search(r"^advantage_estimator +group_mean +group_mean$", text, re.MULTILINE)
    assert re.search(r"^num_iterations +1 +1$", text, re.MULTILINE)
    assert "The same" not in text


def test_diff_as_json_has_both_sides_whole() -> None:
    short, whole = data("diff", "grpo", "dapo"), data("diff", "grpo", "dapo", "--all")
    grpo, dapo = (recipe_dict(resolve(name, registry=REGISTRY)) for name in ("grpo", "dapo"))
    assert (short["a"], short["b"]) == ("grpo", "dapo")
    assert list(short["differences"]) == [
        "sample_filter",
        "reward_shaper",
        "clip_rule",
        "loss_aggregator",
        "kl",
        "sampling",
        "models",
    ]
    assert short["differences"]["clip_rule"] == {"a": grpo["slots"]["clip_rule"], "b": dapo["slots"]["clip_rule"]}
    assert short["differences"]["kl"] == {"a": grpo["kl"], "b": None}
    assert "same" not in short
    assert whole["differences"] == short["differences"]
    assert whole["same"]["advantage_estimator"] == grpo["slots"]["advantage_estimator"]
    assert whole["same"]["min_generations"] == 2


def test_diff_as_markdown_emphasises_what_differs_only_among_the_rest() -> None:
    assert table_of(out("diff", "grpo", "dapo", "--markdown"))[:2] == [
        ["", "grpo", "dapo"],
        ["`sample_filter`", "none", "zero_variance reward=null"],
    ]
    rows = table_of(out("diff", "grpo", "dapo", "--markdown", "--all"))
    assert ["`sample_filter`", "**none**", "**zero_variance reward=null**"] in rows
    assert ["`advantage_estimator`", "group_mean", "group_mean"] in rows


def test_diff_of_a_variant_with_itself_says_so() -> None:
    assert out("diff", "grpo", "grpo") == "grpo and grpo are the same.\n"
    assert out("diff", "grpo", "grpo", "--markdown") == "`grpo` and `grpo` are the same.\n"
    assert data("diff", "grpo", "grpo") == {"a": "grpo", "b": "grpo", "differences": {}}
