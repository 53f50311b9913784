"""The objective as a formula: what stands where, and that no value is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_variants import KL, ClipResult, Recipe, Variant, component, resolve, use
from trl_variants.objective import defaults_of, formula, formula_text, number, number_latex
from trl_variants.registry import load_registry
from trl_variants.slots import SLOTS

REGISTRY = load_registry("none")


def bare(**slots: Any) -> Recipe:
    """REINFORCE with nothing around it, and the slots given."""
    return resolve(Variant(name="bare", extends="reinforce", **{"token_weight": "none", **slots}), registry=REGISTRY)


def clipped(**slots: Any) -> Recipe:
    """The same with a ratio, which a clip rule reads."""
    return bare(**{"importance_ratio": "token", "clip_rule": "ppo_clip", **slots})


def loss_line(recipe: Recipe) -> str:
    return formula_text(recipe)[0]


# -- whole objectives ------------------------------------------------------------------------------


def test_the_objective_of_grpo_is_that_of_its_paper() -> None:
    assert formula_text(resolve("grpo", {"token_weight": "none"}, REGISTRY)) == [
        "ℒ = 1/N Σᵢ 1/|oᵢ| Σₜ [-min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1 - 0.2, 1 + 0.2) Âᵢ) + β KLᵢₜ]",
        "ρᵢₜ = π_θ(oᵢₜ) / π_old(oᵢₜ)",
        "Âᵢ = rᵢ - mean(r₁, …, r_G)",
        "Âᵢ ← Âᵢ / (std₀(r₁, …, r_G) + 10⁻⁶)",
        "KLᵢₜ = π_ref/π_θ - log(π_ref/π_θ) - 1",
        "β = 0.04",
    ]


def test_the_objective_of_rloo_has_no_ratio_and_its_kl_in_the_reward() -> None:
    assert formula_text(resolve("rloo", {"token_weight": "none"}, REGISTRY)) == [
        "ℒ = 1/N Σᵢ Σₜ [-Âᵢ log π_θ(oᵢₜ)]",
        "Âᵢ = rᵢ - 1/(G-1) Σ_{j≠i} rⱼ",
        "rᵢ ← rᵢ - β Σₜ KLᵢₜ",
        "KLᵢₜ = log π_θ - log π_ref",
        "β = 0.05",
    ]


def test_a_ratio_of_the_sequence_stands_in_the_loss_without_a_token() -> None:
    lines = formula_text(resolve("gspo", registry=REGISTRY))
    assert "clip(ρᵢ, 1 - 3×10⁻⁴, 1 + 4×10⁻⁴) Âᵢ" in lines[0]
    assert lines[1] == "ρᵢ = (π_θ(oᵢ) / π_old(oᵢ))^(1/|oᵢ|)"


def test_the_latex_is_what_the_text_is_made_from() -> None:
    recipe = resolve("dr_grpo", {"token_weight": "none"}, REGISTRY)
    assert formula(recipe)[0] == (
        r"\mathcal{L} = \frac{1}{N L_{\max}} \sum_i \sum_t \left[ -\min\left( \rho_{i,t} \hat A_i,\; "
        r"\mathrm{clip}(\rho_{i,t}, 1 - 0.2, 1 + 0.2)\, \hat A_i \right) \right]"
    )
    assert len(formula(recipe)) == len(formula_text(recipe))


@pytest.mark.parametrize("name", REGISTRY.variants)
def test_no_formula_of_a_registered_variant_has_a_brace_too_many_or_an_unfilled_parameter(name: str) -> None:
    recipe = resolve(name, registry=REGISTRY)
    for line in formula(recipe):
        depths = [line[: at + 1].count("{") - line[: at + 1].count("}") for at in range(len(line))]
        assert min(depths) == depths[-1] == 0, line
        assert "None" not in line and "True" not in line and "False" not in line


@pytest.mark.parametrize("name", REGISTRY.variants)
def test_a_parameter_that_is_not_at_its_default_is_never_silent(name: str) -> None:
    recipe = resolve(name, registry=REGISTRY)
    whole = "\n".join(formula(recipe))
    for bound in recipe.components:
        defaults = defaults_of(bound)
        for parameter, value in bound.parameters.items():
            elsewhere = parameter == "weighted" or parameter in SLOTS[bound.slot].parameters  # as a factor in the loss
            if value != defaults[parameter] and not elsewhere:
                spelled = rf"\text{{{parameter.replace('_', chr(92) + '_')}}} = {number_latex(value)}"
                assert spelled in whole or f"{{{parameter}}}" in (bound.info.formula or ""), (bound.name, parameter)


# -- filling in parameters -------------------------------------------------------------------------


@component(
    formula=r"\mathrm{clip}(x, {clip}) \cdot {weight} + \frac{n}{{clip}} + {weight}^2 + \text{ by {level}}_{weight}"
)
def braces(
    log_probs: torch.Tensor, *, clip: float | None = 0.5, weight: float = -2.0, level: str = "a_b"
) -> ClipResult:
    return ClipResult(loss=log_probs)


def test_an_argument_of_a_command_is_no_parameter_and_a_negative_factor_has_parentheses() -> None:
    (line, _) = formula(bare(clip_rule=braces))
    assert r"\mathrm{clip}(x, 0.5) \cdot (-2) + \frac{n}{0.5} + (-2)^2 + \text{ by \text{a\_b}}_{-2}" in line


def test_a_parameter_that_is_null_reads_none() -> None:
    (line, _) = formula_text(bare(clip_rule=use(braces, clip=None)))
    assert "clip(x, none) · (-2) + n/none" in line


@component
def plain_rule(log_ratio: torch.Tensor, advantages: torch.Tensor, *, tau: float = 0.5) -> ClipResult:
    return ClipResult(loss=-advantages * log_ratio.exp() / tau)


def test_a_component_without_a_formula_stands_by_its_name_and_all_its_parameters() -> None:
    lines = formula_text(clipped(clip_rule=plain_rule))
    assert lines[0] == "ℒ = 1/N Σᵢ Σₜ [plain_rule (tau = 0.5)]"
    assert sum("plain_rule" in line for line in lines) == 1


@component
def plain_mean(rewards: torch.Tensor, *, shift: int = 3) -> torch.Tensor:
    return rewards - shift


@component
def plain_filter(rewards: torch.Tensor) -> torch.Tensor:
    return rewards > -1


@component
def plain_term(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return rewards - lengths


def test_every_slot_can_do_without_a_formula() -> None:
    recipe = bare(advantage_estimator=plain_mean, sample_filter=plain_filter, reward_shaper=plain_term)
    assert formula_text(recipe)[1:] == ["Âᵢₜ = plain_mean (shift = 3)", "rᵢ ← plain_term", "plain_filter"]


def test_a_parameter_that_the_formula_does_not_show_is_added_when_it_is_not_its_default() -> None:
    recipe = clipped(
        advantage_estimator=use("group_mean", zero_constant=False),
        advantage_normalizer=use("batch_std", center=False),
        loss_aggregator=use("seq_mean_token_sum_norm", constant=8, count_empty=True),
    )
    lines = formula_text(recipe)
    assert "seq_mean_token_sum_norm (constant = 8, count_empty = true)" in lines
    assert "Âᵢ = rᵢ - mean(r₁, …, r_G) (zero_constant = false)" in lines
    assert lines[-1].endswith("over the batch, by token (center = false)")


# -- the parts of the loss -------------------------------------------------------------------------


def test_token_weights_multiply_the_policy_term_but_not_the_kl() -> None:
    line, *where = formula_text(clipped(token_weight="rollout_correction", kl=KL("k2", placement="loss", coef=0.5)))
    assert line.endswith("Âᵢ) · wᵢₜ + β KLᵢₜ]")
    assert "wᵢₜ = π_old / π_sampler (sequence_mask, [none, 3])" in where


@component(formula=r"v_t")
def other_weight(log_probs: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(log_probs)


def test_several_token_weights_are_a_product_of_named_factors() -> None:
    lines = formula_text(bare(token_weight=["rollout_correction", other_weight]))
    assert "wᵢₜ = rollout_correction · other_weight" in lines
    assert "other_weight = vₜ" in lines


@component(formula=r"-w_{i,t} \hat A_{i,t}")
def weighing_rule(log_probs: torch.Tensor, token_weights: torch.Tensor) -> ClipResult:
    return ClipResult(loss=log_probs * token_weights)


def test_a_clip_rule_that_takes_the_weights_itself_is_not_multiplied_again() -> None:
    recipe = bare(clip_rule=weighing_rule, token_weight=other_weight)
    assert formula_text(recipe)[:2] == ["ℒ = 1/N Σᵢ Σₜ [-wᵢₜ Âᵢ]", "wᵢₜ = vₜ"]


@pytest.mark.parametrize(
    ("weighted", "term"), [(False, "β KLᵢₜ"), (True, "β ρᵢₜ KLᵢₜ"), ("detached", "β sg[ρᵢₜ] KLᵢₜ")]
)
def test_a_weighted_kl_has_the_ratio_before_it(weighted: Any, term: str) -> None:
    recipe = clipped(kl=KL("k3", placement="loss", coef=0.1, weighted=weighted))
    assert loss_line(recipe).endswith(f"+ {term}]")


def test_a_weighted_kl_defines_the_ratio_even_where_the_clip_rule_reads_none() -> None:
    recipe = bare(importance_ratio="token", kl=KL("k3", placement="loss", coef=0.1, weighted=True))
    assert "ρᵢₜ = π_θ(oᵢₜ) / π_old(oᵢₜ)" in formula_text(recipe)


def test_an_adaptive_coefficient_has_a_start_and_a_rule() -> None:
    recipe = bare(
        kl=KL("k1", placement="token_reward", coef=0.2, controller=use("adaptive", target=6.0, level="sequence"))
    )
    assert formula_text(recipe)[-1] == (
        "β = 0.2 at the start, β ← β (1 + clip(KL/6 - 1, -0.2, 0.2) n/10000) (level = sequence)"
    )


def test_regularizers_are_added_with_their_coefficients_and_their_own_mean() -> None:
    recipe = bare(regularizer=[use("entropy_bonus", coef=0.01), "adaptive_entropy"])
    line, *where = formula_text(recipe)
    mean = "1/(Σᵢ |oᵢ|) Σᵢ Σₜ"
    assert line.endswith(f"] + 0.01 · {mean} (-Hᵢₜ) + {mean} (-α Hᵢₜ)")
    assert "α ← α ± 0.005 to hold H = 0.2" in where


def test_a_negative_coefficient_is_subtracted() -> None:
    assert "- 0.5 · 1/(Σᵢ |oᵢ|)" in loss_line(bare(regularizer=[use("entropy_bonus", coef=-0.5)]))


def test_a_rule_with_a_condition_is_defined_apart() -> None:
    line, definition, *_ = formula_text(clipped(clip_rule=use("dual_clip", c=4.0)))
    assert line == "ℒ = 1/N Σᵢ Σₜ [ℓᵢₜ]"
    assert definition == "ℓᵢₜ = -max(min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1 - 0.2, 1 + 0.2) Âᵢ), 4 Âᵢ) where Âᵢ < 0"


# -- rewards and advantages ------------------------------------------------------------------------


def test_rewards_are_shaped_in_the_order_in_which_it_happens() -> None:
    recipe = bare(
        reward_shaper=["whiten_token_rewards", "missing_eos_penalty", "clip_rewards", "soft_overlong"],
        kl=KL("k1", placement="token_reward", coef=0.1),
    )
    shaped = [line for line in formula_text(recipe) if line.startswith("r")]
    assert shaped == [
        "rᵢ ← rᵢ - 1 · [no stop token]",  # a term is added, with its own sign
        "rᵢ ← clip(rᵢ, -10, 10)",  # one that reads rewards replaces them
        "rᵢ ← rᵢ + clip(((L - c) - |oᵢ|)/c, -1, 0), L the length limit, c the cache",
        "rᵢₜ ← rᵢₜ - β KLᵢₜ",
        "rᵢₜ ← (rᵢₜ - mean(r))/(std(r) + 10⁻⁸)",  # declared after_kl
    ]


def test_advantages_per_token_keep_their_index_everywhere() -> None:
    recipe = clipped(advantage_estimator="reward_to_go", advantage_normalizer="group_std")
    lines = formula_text(recipe)
    assert "ρᵢₜ Âᵢₜ" in lines[0]
    assert "Âᵢₜ ← Âᵢₜ / (std₀(r₁, …, r_G) + 10⁻⁶)" in lines
    assert not any("Âᵢ " in line for line in lines)


@component(formula=r"\hat A_{i,t} \leftarrow \hat A_i h_{i,t}")
def per_token(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return advantages[:, None] * mask


def test_a_normalizer_that_makes_advantages_per_token_leaves_the_loss_its_index() -> None:
    lines = formula_text(bare(advantage_normalizer=per_token))
    assert lines == ["ℒ = 1/N Σᵢ Σₜ [-Âᵢₜ log π_θ(oᵢₜ)]", "Âᵢ = rᵢ - 0", "Âᵢₜ ← Âᵢ hᵢₜ"]


# -- values ----------------------------------------------------------------------------------------


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_written_with_every_digit(value: float) -> None:
    assert float(number(value)) == value


@pytest.mark.parametrize(
    ("value", "text", "latex"),
    [
        (0.2, "0.2", "0.2"),
        (-10.0, "-10", "-10"),
        (1e-3, "0.001", "0.001"),
        (3.5e-4, "3.5e-4", r"3.5 \times 10^{-4}"),
        (1e-8, "1e-8", "10^{-8}"),
        (-1e-8, "-1e-8", r"-1 \times 10^{-8}"),
        (1e12, "1e12", "10^{12}"),
        (7, "7", "7"),
        (True, "true", r"\text{true}"),
        (None, "null", r"\text{none}"),
        ("a_b", "a_b", r"\text{a\_b}"),
        ([1.0, None], "[1, null]", r"\text{[1, null]}"),
    ],
)
def test_a_value_is_written_as_in_yaml_and_in_latex(value: Any, text: str, latex: str) -> None:
    assert (number(value), number_latex(value)) == (text, latex)
