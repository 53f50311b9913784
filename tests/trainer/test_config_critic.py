"""The settings of the critic and of repeated updates: what is refused before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiny
from tests.trainer.test_config import refused


def test_ppo_proposes_one_completion_and_four_epochs(tmp_path: Any) -> None:
    args = tiny.config(tmp_path, "ppo", num_generations=None)
    assert (args.num_generations, args.num_iterations, args.updates_per_rollout) == (1, 4, 4)
    assert args.recipe.variant.critic == "separate"
    # The old trainer's four numbers, where a user of it looks for them.
    assert args.recipe.kl.coef == 0.05 and args.recipe.regularizers[0].parameters == {"clip": 0.2, "coef": 0.1}
    assert tiny.config(tmp_path, "ppo", steps_per_generation=6, num_iterations=2).updates_per_rollout == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"critic_model": "x"},
        {"critic_learning_rate": 1e-5},
        {"critic_max_grad_norm": 1.0},
        {"critic_warmup_steps": 0},
        {"critic_learning_rate": 1e-5, "critic_warmup_steps": 3},
    ],
)
def test_a_setting_of_the_critic_without_a_critic_is_refused(settings: dict[str, Any], tmp_path: Any) -> None:
    assert refused(tmp_path, "grpo", **settings) == (
        f"{', '.join(settings)} is set, and variant 'grpo' has no critic. Use variant: ppo, or leave it out."
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"critic_learning_rate": 0.0}, "critic_learning_rate must be above 0, not 0.0."),
        ({"critic_learning_rate": float("nan")}, "critic_learning_rate must be above 0, not nan."),
        ({"critic_max_grad_norm": -1.0}, "critic_max_grad_norm must be at least 0, not -1.0."),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps must be at least 0, not -1."),
        ({"critic_warmup_steps": "2"}, "critic_warmup_steps must be a whole number, not '2'."),
        ({"critic_warmup_steps": True}, "critic_warmup_steps must be a whole number, not True."),
        ({"target_kl": "0.1"}, "target_kl must be a number, not '0.1'."),
        (
            {"critic_model": ""},
            "critic_model must be a folder or an id, not ''; a model goes to the trainer.",
        ),
        (
            {"torch_compile": True},
            "torch_compile is not supported with a critic in this release. Leave one of them out.",
        ),
        (
            {"variant_overrides": {"regularizer": {"coef": 0}}},
            "variant 'ppo' has a critic, and no regularizer trains it. Add value_loss to regularizer, with a coef "
            "above 0.",
        ),
        ({"critic_warmup_steps": 3}, "critic_warmup_steps (3) leaves none of the 3 steps (max_steps) for the policy."),
        ({"target_kl": 0.0}, "target_kl must be above 0, not 0.0."),
        (
            {"target_kl": 0.1, "num_iterations": 1},
            "target_kl is set, and there is one update per rollout, so there is none left to stop. Set num_iterations "
            "to 2 or more, or steps_per_generation to a multiple of gradient_accumulation_steps, or leave it out.",
        ),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "per_device_eval_batch_size": 4},
            "lr_scheduler_type reduce_lr_on_plateau steps by a metric, and a critic has none. Use another.",
        ),
        (
            {"optim": "schedule_free_adamw"},
            "optim schedule_free_adamw cannot step a critic as well. Use optim: adamw_torch.",
        ),
        (
            {"variant_overrides": {"critic": "shared"}, "critic_model": "x"},
            "critic_model is set, and a shared critic is a head on the policy's backbone. Use variant_overrides: "
            "{critic: separate}, or leave critic_model out.",
        ),
        (
            {"variant_overrides": {"regularizer": "entropy_bonus"}},
            "variant 'ppo' has a critic, and no regularizer trains it. Add value_loss to regularizer, with a coef "
            "above 0.",
        ),
        (
            {"variant_overrides": {"critic": "none"}},
            "advantage_estimator 'gae' needs values, and variant 'ppo' has no critic.",
        ),
        (
            {"variant_overrides": {"advantage_estimator": "reward_to_go"}},
            "variant 'ppo' has a critic, and advantage_estimator 'reward_to_go' does not read its values. Use "
            "advantage_estimator: gae, or critic: none and no value_loss.",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str, tmp_path: Any) -> None:
    # pains E09 among them.
    assert refused(tmp_path, "ppo", **settings) == message


STEPS_APART = pytest.mark.parametrize("settings", [{}, {"variant": "grpo", "target_kl": 0.1, "num_iterations": 2}])


@STEPS_APART
def test_deepspeed_is_refused_for_now(settings: dict[str, Any], tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert refused(tmp_path, **{"variant": "ppo", **settings}) == (
        "DeepSpeed is not supported with a critic or target_kl in this release. Use DDP (accelerate launch "
        "--multi_gpu) or FSDP2 (--use_fsdp --fsdp_version 2), or a variant without a critic."
    )


@STEPS_APART
@pytest.mark.parametrize("asked", ["by the launcher", "by the launcher, version 1", "by the config"])
def test_fsdp_1_is_refused(asked: str, settings: dict[str, Any], tmp_path: Any, monkeypatch: Any) -> None:
    if asked == "by the config":
        settings = {**settings, "fsdp": True, "fsdp_config": {"version": 1}}
    else:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    if asked.endswith("1"):
        monkeypatch.setenv("FSDP_VERSION", "1")
    assert refused(tmp_path, **{"variant": "ppo", **settings}) == (
        "FSDP1 is not supported with a critic or target_kl. Use FSDP2: fsdp_version: 2 in the config of accelerate "
        "launch, or version: 2 in fsdp_config."
    )


@STEPS_APART
@pytest.mark.parametrize("asked", ["by the launcher", "by the config"])
def test_fsdp_2_is_taken(asked: str, settings: dict[str, Any], tmp_path: Any, monkeypatch: Any) -> None:
    if asked == "by the config":
        settings = {**settings, "fsdp": True}
    else:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
    assert tiny.config(tmp_path, **{"variant": "ppo", **settings}).recipe


def test_fp16_is_refused_with_a_critic(tmp_path: Any) -> None:
    assert refused(tmp_path, "ppo", fp16=True).startswith("fp16 scales the loss")
