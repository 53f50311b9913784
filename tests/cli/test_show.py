"""`trl-variants show`."""

from __future__ import annotations

import re

import pytest

from tests.cli.reading import HERE, REGISTRY, data, error, out, table_of
from trl_variants.describe import formula, formula_text, recipe_dict
from trl_variants.resolution import resolve
from trl_variants.slots import SLOTS

pytestmark = pytest.mark.usefixtures("builtins_only")


def test_show_has_a_part_for_each_question() -> None:
    text = out("show", "dapo")
    assert text.startswith(
        f"dapo  extends grpo · arXiv:2503.14476 · {HERE}\n"
        "Clip-higher, groups without signal replaced by new ones, token mean, soft\noverlong penalty, no KL.\n"
        "\nObjective\n"
    )
    assert re.findall(r"^\w+$", text, re.MULTILINE) == ["Objective", "Slots", "Models", "Needs"]


def test_show_aligns_the_objective_at_its_signs() -> None:
    text = out("show", "grpo", "--overrides", "token_weight: none")
    assert (
        "  ℒ    = 1/N Σᵢ 1/|oᵢ| Σₜ [-min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1 - 0.2, 1 + 0.2) Âᵢ) + β\n"
        "         KLᵢₜ]\n"
        "  ρᵢₜ  = π_θ(oᵢₜ) / π_old(oᵢₜ)\n"
        "  Âᵢ   = rᵢ - mean(r₁, …, r_G)\n"
        "  Âᵢ   ← Âᵢ / (std₀(r₁, …, r_G) + 10⁻⁶)\n"
        "  KLᵢₜ = π_ref/π_θ - log(π_ref/π_θ) - 1\n"
        "  β    = 0.04\n"
        "  oᵢ a completion, t its tokens; N completions in the step; G of one prompt\n"
    ) in text


def test_show_says_where_each_slot_comes_from_and_what_is_empty() -> None:
    text = out("show", "dapo", columns=140)
    rows = {line.split()[0]: line for line in text.split("\n") if line.startswith("  ") and line.strip()}
    assert re.search(r"ppo_clip epsilon_low=0.2, epsilon_high=0.28 +arXiv:1707.06347$", rows["clip_rule"])
    assert re.search(r"group_mean zero_constant=true +as grpo +arXiv:2402.03300$", rows["advantage_estimator"])
    assert re.search(r"clip_min=null +default ", rows["token_weight"])
    assert re.search(r"^  kl +none$", rows["kl"])
    assert "  Empty: regularizer.\n" in text
    assert re.search(r"^  settings +sampling=resample$", text, re.MULTILINE)


def test_show_marks_what_an_override_changes() -> None:
    overrides = "{clip_rule: cispo, kl: {coef: 1e-6}, regularizer: {name: entropy_bonus, coef: 1e-2}, critic: none}"
    result = data("show", "grpo", "--overrides", overrides)
    assert result["kl"]["coef"] == 1e-6
    changed = {slot for slot, source in result["set_by"].items() if source == "override"}
    assert changed == {"regularizer", "clip_rule", "kl", "kl_controller", "critic"}
    text = out("show", "grpo", "--overrides", overrides, columns=140)
    assert re.search(r"clip_rule +cispo epsilon_max=5 +override", text)
    assert re.search(r"kl_controller +fixed coef=1e-6 +override", text)
    assert not re.search(r"kl_estimator.*override", text)


def test_show_of_a_variant_whose_kl_is_switched_off_says_so() -> None:
    assert data("show", "rloo", "--overrides", '{"kl": null}')["set_by"]["kl_estimator"] == "override"
    text = out("show", "rloo", "--overrides", "kl: none")
    assert re.search(r"^  kl +none +override$", text, re.MULTILINE)
    assert "There is no critic and\n  no reference.\n" in text


def test_show_as_json_is_the_dict_of_the_recipe_and_more() -> None:
    recipe, result = resolve("gspo_token", registry=REGISTRY), data("show", "gspo_token")
    expected = recipe_dict(recipe)
    assert {key: result[key] for key in expected} == expected
    assert result["objective"] == {"latex": formula(recipe), "text": formula_text(recipe)}
    assert result["extends"] == "gspo"
    assert result["registered_by"] == HERE
    assert result["models"] == [
        {"name": "policy", "trained": True, "reason": "generates the completions and learns from them"}
    ]
    sources = {slot: result["set_by"][slot] for slot in ("importance_ratio", "clip_rule", "loss_aggregator", "critic")}
    assert sources == {
        "importance_ratio": "gspo_token",
        "clip_rule": "gspo",
        "loss_aggregator": "grpo",
        "critic": "default",
    }


def test_show_as_markdown_has_the_formula_and_a_row_for_every_slot() -> None:
    text = out("show", "grpo", "--markdown")
    lines = formula(resolve("grpo", registry=REGISTRY))
    body = " \\\\\n".join(f"& {line}" for line in lines)
    assert f"```math\n\\begin{{aligned}}\n{body}\n\\end{{aligned}}\n```" in text
    header, *rows = table_of(text.split("```")[2])
    assert header == ["slot", "component", "parameters", "set by", "paper", "distribution"]
    cells = {row[0].strip("`"): row for row in rows if row[0].strip("`") in SLOTS}
    assert set(cells) == set(SLOTS)
    assert cells["clip_rule"][1:4] == ["`ppo_clip`", "`epsilon_low=0.2, epsilon_high=0.2`", "grpo"]
    assert cells["kl_controller"][1:4] == ["`fixed`", "`coef=0.04`", "grpo"]
    assert cells["regularizer"][1:4] == ["none", "", "default"]
    assert "| reference | frozen | the policy as it was at the start, for k3 |" in text
    assert "- At least 2 completions per prompt (num_generations), for group_mean, group_std.\n" in text


def test_show_of_a_plugin_names_whose_components_are_not_its_own(plugin: str) -> None:
    text = out("show", "soft", "--plugins", plugin, columns=300)
    assert text.startswith(f"soft  extends dapo · {plugin}\nSoft.\n")
    assert "soft_clip (tau = 0.5) · wᵢₜ" in text
    assert "arXiv:2503.14476\n" in text and HERE in text
    assert re.search(r"^  settings +num_generations=16, sampling=resample$", text, re.MULTILINE)
    assert re.search(r"clip_rule +soft_clip tau=0.5 +example.org/a/long/address/of/a/$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("[1", "--overrides can be read neither as JSON nor as YAML: '[1'."),
        (
            "clip_rule:cispo",
            "--overrides must be a mapping by slot, such as '{clip_rule: {epsilon_high: 0.28}}' "
            "(a space follows each colon); not 'clip_rule:cispo'.",
        ),
        (
            "{clip_rule: {epsilon_hi: 1}}",
            "clip_rule 'ppo_clip' has no parameter 'epsilon_hi'. Did you mean 'epsilon_high'?",
        ),
    ],
)
def test_overrides_that_make_no_sense_are_refused(overrides: str, message: str) -> None:
    assert error("show", "grpo", "--overrides", overrides) == f"Error: {message}"


def test_an_unknown_variant_is_refused_with_the_nearest() -> None:
    known = ", ".join(f"{name} ({HERE})" for name in sorted(REGISTRY.variants))
    message = f"Error: No variant named 'gropo'. Did you mean 'grpo'? Registered: {known}."
    assert error("show", "gropo") == message
    assert error("diff", "grpo", "gropo") == message
