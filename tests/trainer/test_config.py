"""`VariantConfig`: who owns a setting, what is refused, and that all of TRL's own checks still run."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from trl import GRPOConfig

from tests import tiny
from trl_variants import Variant, VariantConfig, VariantError
from trl_variants.firstparty import where_to_get

ENTROPY = "regularizer: {name: adaptive_entropy, %s: ...}"
#: Every setting that the variant alone decides: a value to set, and the override that the message must name.
OWNED: dict[str, tuple[Any, str]] = {
    "loss_type": ("dapo", "loss_aggregator: ..."),
    "beta": (0.0, "kl: {coef: ...}"),
    "use_bias_correction_kl": (False, "kl: {weighted: ...}"),
    "epsilon": (0.2, "clip_rule: {epsilon_low: ..., epsilon_high: ...}"),
    "epsilon_high": (0.28, "clip_rule: {epsilon_high: ...}"),
    "delta": (2.0, "clip_rule: {name: dual_clip, c: ...}"),
    "importance_sampling_level": ("token", "importance_ratio: ..."),
    "scale_rewards": (False, "advantage_normalizer: ..."),
    "multi_objective_aggregation": ("sum_then_normalize", "advantage_estimator: ..."),
    "mask_truncated_completions": (True, "sample_filter: truncated"),
    "entropy_coef": (0.0, "regularizer: {name: entropy_bonus, coef: ...}"),
    "use_adaptive_entropy": (True, "regularizer: adaptive_entropy"),
    "entropy_coef_min": (0.0, ENTROPY % "low"),
    "entropy_coef_max": (1.0, ENTROPY % "high"),
    "entropy_coef_delta": (0.1, ENTROPY % "delta"),
    "entropy_target": (0.2, ENTROPY % "target"),
    "vllm_importance_sampling_correction": (False, "token_weight: rollout_correction"),
    "vllm_importance_sampling_mode": ("token_mask", "token_weight: {mode: ...}"),
    "vllm_importance_sampling_clip_max": (3.0, "token_weight: {clip_max: ...}"),
    "vllm_importance_sampling_clip_min": (0.1, "token_weight: {clip_min: ...}"),
    "vllm_importance_sampling_cap": (2.0, "token_weight: {clip_max: ...}"),
}
OWNED["top_entropy_quantile"] = (
    0.5,
    "token_weight: [{name: high_entropy_mask, top_entropy_quantile: ...}, rollout_correction]",
)
OWNED["off_policy_mask_threshold"] = (
    0.5,
    "token_weight: [{name: off_policy_mask, threshold: ...}, rollout_correction]",
)
OWNED |= {f"sapo_temperature_{side}": (1.0, f"clip_rule: {{name: sapo, tau_{side}: ...}}") for side in ("neg", "pos")}
OWNED |= {
    f"vespo_{name}": (1.0, f"clip_rule: {{name: vespo, {name}: ...}}")
    for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
}
FROZEN_REFERENCE = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.5, "ref_model_sync_steps": 64}


def refused(folder: Any, *args: Any, **settings: Any) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(VariantError) as caught:
        tiny.config(folder, *args, **settings)
    return str(caught.value)


# -- the variant alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWNED)
def test_a_setting_that_the_variant_decides_is_refused_with_the_override_to_use(name: str, tmp_path: Any) -> None:
    value, override = OWNED[name]
    home = "".join(map(where_to_get, re.findall(r"name: (\w+)", override)))
    assert refused(tmp_path, **{name: value}) == (
        f"{name} is set in the config, but the variant decides it. Use variant_overrides: {{{override}}}.{home}"
    )


@pytest.mark.parametrize("name", FROZEN_REFERENCE)
def test_a_reference_that_moves_is_refused(name: str, tmp_path: Any) -> None:
    assert refused(tmp_path, **{name: FROZEN_REFERENCE[name]}) == (
        f"{name} is set in the config, but the reference of a variant never changes. Remove it."
    )


def test_no_field_of_trl_that_changes_the_objective_is_left_over() -> None:
    known = {f.name for f in fields(GRPOConfig)}
    owned = {f.name for f in VariantConfig._owned_fields()}
    assert owned == {*OWNED, *FROZEN_REFERENCE}
    assert owned <= known
    for prefix in ("sapo_", "vespo_", "vllm_importance_sampling_", "entropy_", "ref_model_", "epsilon"):
        assert {name for name in known if name.startswith(prefix)} <= owned


@pytest.mark.parametrize("name", [*OWNED, *FROZEN_REFERENCE])
def test_the_help_of_an_owned_field_says_what_to_write_instead(name: str) -> None:
    (field,) = (f for f in fields(VariantConfig) if f.name == name)
    assert field.default is None
    assert field.metadata["help"].startswith("Decided by the variant. Use variant_overrides: {")


def test_what_trl_itself_reads_is_neutral_whatever_the_variant(tmp_path: Any) -> None:
    # TRL's constructor loads a reference where beta is not 0, and its scoring corrects where the flag says so.
    args = tiny.config(tmp_path, "rloo")
    assert (args.beta, args.vllm_importance_sampling_correction, args.use_adaptive_entropy) == (0.0, False, False)
    assert args.recipe.kl.coef == 0.05


# -- TRL's own -----------------------------------------------------------------------------------------------------


def test_settings_of_the_user_pass_through(tmp_path: Any) -> None:
    settings = {
        "temperature": 0.7,
        "top_k": 5,
        "max_completion_length": 5,
        "reward_weights": [0.5],
        "learning_rate": 3e-4,
        "num_generations_eval": 1,
        "disable_dropout": True,
        "generation_kwargs": {"eos_token_id": [1, 5]},
        "log_completions": True,
    }
    args = tiny.config(tmp_path, "dapo", **settings)
    assert {name: getattr(args, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size is not supported by GRPO"),
        (
            {"generation_batch_size": 8, "steps_per_generation": 2},
            "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time",
        ),
        ({"log_completions_hub_repo": "a/b"}, "log_completions_hub_repo is set, but log_completions is False"),
        ({"generation_batch_size": 6}, r"generation_batch_size \(6\) must be divisible by the global batch size"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "requires the save and eval strategy to match"),
    ],
)
@pytest.mark.parametrize("generations", [1, 4])
def test_every_other_check_of_trl_still_runs(
    settings: dict[str, Any], message: str, generations: int, tmp_path: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.config(tmp_path, "reinforce", num_generations=generations, **settings)


def test_generation_batch_size_sets_the_steps_as_in_trl(tmp_path: Any) -> None:
    args = tiny.config(tmp_path, "grpo", generation_batch_size=16)
    assert (args.steps_per_generation, args.generation_batch_size, args.num_generations) == (4, 16, 4)


# -- the variant proposes, the user wins ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "generations"), [("grpo", 8), ("rloo", 8), ("dapo", 8), ("reinforce", 1), ("reinforce_pp", 1)]
)
def test_the_default_number_of_generations_is_8_or_1_where_one_will_do(
    variant: str, generations: int, tmp_path: Any
) -> None:
    assert VariantConfig(output_dir=str(tmp_path), variant=variant, **tiny.SETTINGS).num_generations == generations


def test_a_variant_proposes_generations_and_epochs_and_the_user_wins(tmp_path: Any) -> None:
    mine = Variant(name="mine", extends="grpo", num_generations=2, num_iterations=3)
    proposed = VariantConfig(output_dir=str(tmp_path), variant=mine, **tiny.SETTINGS)
    assert (proposed.num_generations, proposed.num_iterations) == (2, 3)
    settings = {**tiny.SETTINGS, "num_generations": 4, "num_iterations": 1}
    chosen = VariantConfig(output_dir=str(tmp_path), variant=mine, **settings)
    assert (chosen.num_generations, chosen.num_iterations) == (4, 1)
    assert VariantConfig(output_dir=str(tmp_path), **tiny.SETTINGS).num_iterations == 1


def test_one_generation_is_refused_where_a_component_needs_a_group(tmp_path: Any) -> None:
    assert refused(tmp_path, "grpo", num_generations=1) == (
        "advantage_estimator 'group_mean' needs at least 2 generations per prompt; num_generations is 1."
    )
    assert refused(tmp_path, "rloo", num_generations=1) == (
        "advantage_estimator 'leave_one_out' needs at least 2 generations per prompt; num_generations is 1."
    )
    override = {"sample_filter": "zero_variance"}
    assert refused(tmp_path, "reinforce", num_generations=1, variant_overrides=override) == (
        "sample_filter 'zero_variance' needs at least 2 generations per prompt; num_generations is 1."
    )


@pytest.mark.parametrize("name", ["num_generations", "num_iterations"])
def test_zero_generations_or_epochs_are_refused(name: str, tmp_path: Any) -> None:
    given = {"num_generations": 4, "num_iterations": 1, name: 0}
    assert refused(tmp_path, "reinforce_pp", **given) == (
        f"num_generations ({given['num_generations']}) and num_iterations ({given['num_iterations']}) "
        "must be at least 1."
    )


def test_zero_generations_for_evaluation_mean_those_of_training_and_fewer_are_refused(tmp_path: Any) -> None:
    assert refused(tmp_path, "grpo", num_generations_eval=-1) == "num_generations_eval (-1) must be at least 1."


# -- how things divide ---------------------------------------------------------------------------------------------


def test_an_indivisible_rollout_is_refused_with_the_product_and_what_would_fit(tmp_path: Any) -> None:
    # 3 x 1 x 2 = 6 completions. With 2 steps the batch size must be even for groups of 4; of the divisors of 6, which
    # are 2, 3 and 6, the nearest to 4 are 3 and then 2, which lies as far as 6 and asks for less.
    settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "num_generations": 4}
    assert refused(tmp_path, "grpo", **settings) == (
        "A rollout is per_device_train_batch_size 3 x 1 process(es) x steps_per_generation 2 = 6 completions, which "
        "are no whole number of groups of num_generations 4. Nearest that fit: per_device_train_batch_size 2 or 4, or "
        "num_generations 2 or 3."
    )


def test_what_is_said_to_fit_does_fit(tmp_path: Any) -> None:
    settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "num_generations": 4}
    for fitting in ({"per_device_train_batch_size": 2}, {"per_device_train_batch_size": 4}, {"num_generations": 3}):
        tiny.config(tmp_path, "grpo", **{**settings, **fitting})


def test_a_batch_size_below_one_is_never_proposed(tmp_path: Any) -> None:
    # 1 x 1 x 1 = 1 completion: the only batch sizes that fit groups of 4 are multiples of 4; no group of 2 or more
    # fits into one completion.
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_generations": 4}
    assert refused(tmp_path, "grpo", **settings) == (
        "A rollout is per_device_train_batch_size 1 x 1 process(es) x steps_per_generation 1 = 1 completions, which "
        "are no whole number of groups of num_generations 4. Nearest that fit: per_device_train_batch_size 4."
    )


def test_one_completion_per_step_is_enough_where_one_will_do(tmp_path: Any) -> None:
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_generations": 1}
    assert tiny.config(tmp_path, "reinforce", **settings).generation_batch_size == 1


def test_steps_per_generation_must_be_a_multiple_of_the_accumulation(tmp_path: Any) -> None:
    for steps, nearest in ((3, "2 or 4"), (1, "2")):
        assert refused(tmp_path, "grpo", steps_per_generation=steps) == (
            f"steps_per_generation ({steps}) must be a multiple of gradient_accumulation_steps (2): otherwise an "
            f"optimizer step would span two rollouts. Nearest that fit: steps_per_generation {nearest}."
        )
    assert tiny.config(tmp_path, "grpo", steps_per_generation=6).steps_per_generation == 6


@pytest.mark.parametrize("variant", ["reinforce", "rloo"])
@pytest.mark.parametrize(
    ("settings", "product"),
    [
        ({"num_iterations": 2}, "num_iterations 2 x steps_per_generation 2 / gradient_accumulation_steps 2 makes 2"),
        (
            {"steps_per_generation": 4},
            "num_iterations 1 x steps_per_generation 4 / gradient_accumulation_steps 2 makes 2",
        ),
    ],
)
def test_a_second_update_is_refused_where_nothing_corrects_for_it(
    variant: str, settings: dict[str, Any], product: str, tmp_path: Any
) -> None:
    assert refused(tmp_path, variant, **settings) == (
        f"variant '{variant}' allows 1 update(s) per rollout: it does not correct for a policy that has moved on. "
        f"{product}. Set num_iterations: 1 and steps_per_generation: 2, or use a variant with a clip rule."
    )


def test_an_evaluation_batch_must_hold_whole_groups(tmp_path: Any) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6}
    assert refused(tmp_path, "grpo", **settings) == (
        "An evaluation batch is per_device_eval_batch_size 6 x 1 process(es), which is no whole number of groups of "
        "num_generations_eval 4. Set num_generations_eval: 1, or make per_device_eval_batch_size a multiple of 4."
    )
    assert tiny.config(tmp_path, "grpo", num_generations_eval=1, **settings).num_generations_eval == 1
