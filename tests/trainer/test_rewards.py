"""Rewards, masks and lengths on a real run: from what reward functions return to what is trained and logged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.trainer import runs
from trl_variants import VariantError

DR_GRPO = {"advantage_normalizer": "none", "kl": "none"}


def by_place(values: list[float | None]) -> Any:
    """A reward function that gives the k-th completion of every group the k-th value."""

    def places(completions: list[str], **_: Any) -> list[float | None]:
        return [values[i % len(values)] for i in range(len(completions))]

    return places


def rollout_of(trainer: runs.Watched, index: int = 0) -> tuple[Any, Any]:
    rollout, result, _ = trainer.spy.rollouts[index]
    return rollout, result


# -- what reward functions may return ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "expected"),
    # pains B04. Rewards 1, None, 0, 0: the mean of the scored is 1/3, their population variance 2/9, and each one's
    # siblings have mean 0, 1/2, 1/2.
    [
        ("grpo", [2 / 3 / math.sqrt(2 / 9), 0, -1 / 3 / math.sqrt(2 / 9), -1 / 3 / math.sqrt(2 / 9)]),
        ("dr_grpo", [2 / 3, 0, -1 / 3, -1 / 3]),
        ("rloo", [1, 0, -0.5, -0.5]),
        ("reinforce", [1, 0, 0, 0]),
    ],
)
def test_a_completion_that_no_function_scores_is_in_no_baseline(variant: str, expected: Any, tmp_path: Any) -> None:
    trainer = runs.trained(
        tmp_path, variant, rewards=by_place([1, None, 0, 0]), max_steps=1, variant_overrides={"kl": "none"}
    )
    rollout, result = rollout_of(trainer)
    assert rollout.scored.tolist() == [True, False, True, True] * 2
    assert result.advantages.tolist() == pytest.approx(expected * 2, abs=1e-5)
    assert trainer.logs[0]["reward"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("variant", ["grpo", "dapo", "rloo", "reinforce_pp", "trl_grpo"])
def test_a_rollout_that_nothing_scores_moves_nothing_and_stays_finite(variant: str, tmp_path: Any) -> None:
    model = tiny.model()
    before = runs.weights(model)
    trainer = runs.trained(
        tmp_path,
        variant,
        model=model,
        rewards=by_place([None]),
        max_steps=1,
        variant_overrides={"kl": "none"},
        **runs.SGD,
    )
    assert torch.equal(runs.weights(model), before)
    assert trainer.logs[0]["loss"] == 0 and trainer.logs[0]["reward"] is None


def test_one_scored_completion_in_a_group_gives_nothing_and_spoils_nothing(tmp_path: Any) -> None:
    # pains B03: the sample's standard deviation of one number is 0/0.
    rewards = by_place([1, None, None, None, 1, 0, 0, 0])
    for variant in ("grpo", "trl_grpo", "rloo"):
        trainer = runs.trained(tmp_path, variant, rewards=rewards, max_steps=1)
        _, result = rollout_of(trainer)
        assert result.advantages[:4].tolist() == [0, 0, 0, 0]
        assert result.advantages.isfinite().all() and result.advantages[4] > 0


def test_each_function_may_skip_completions_of_its_own(tmp_path: Any) -> None:
    functions = [by_place([1, None, 0, None]), by_place([None, 2, 0, None])]
    trainer = runs.trained(
        tmp_path, "dr_grpo", rewards=functions, reward_weights=[1.0, 0.5], max_steps=1, variant_overrides=DR_GRPO
    )
    rollout, result = rollout_of(trainer)
    assert rollout.rewards.tolist() == pytest.approx([1, 1, 0, 0] * 2)
    assert rollout.scored.tolist() == [True, True, True, False] * 2
    assert result.advantages.tolist() == pytest.approx([1 / 3, 1 / 3, -2 / 3, 0] * 2, abs=1e-6)


async def in_background(completions: list[str], **_: Any) -> list[float]:
    """An async reward."""
    return [float(len(text)) for text in completions]


class Judge:
    """A reward function that is an object."""

    def __call__(self, completions: list[str], **_: Any) -> Tensor:
        return torch.tensor([float(len(text)) for text in completions])


def test_functions_may_be_async_and_objects_and_return_tensors_or_arrays(tmp_path: Any) -> None:
    def array(completions: list[str], **_: Any) -> Any:
        return np.array([len(text) for text in completions], dtype=np.int64)

    def truth(completions: list[str], **_: Any) -> list[bool]:
        return [len(text) > 10 for text in completions]

    trainer = runs.trained(tmp_path, "grpo", rewards=[in_background, Judge(), array, truth], max_steps=1)
    rollout, _ = rollout_of(trainer)
    columns = rollout.rewards_per_func
    assert torch.equal(columns[:, 0], columns[:, 1]) and torch.equal(columns[:, 0], columns[:, 2])
    assert torch.equal(columns[:, 3], (columns[:, 0] > 10).float())
    assert rollout.reward_names == ("in_background", "Judge", "array", "truth")


BAD = {
    "nan": (math.nan, "returned nan for completion 1; a reward must be finite, or None for a completion that it does"),
    "infinite": (math.inf, "returned inf for completion 1; a reward must be finite"),
    "too_large": (1e39, "returned 1e+39 for completion 1; a reward must be finite"),
    "text": ("high", "returned 'high' for completion 1; a reward must be a number or None."),
    "digits": ("0.5", "returned '0.5' for completion 1; a reward must be a number or None."),
    "pair": ([1.0, 2.0], "returned [1.0, 2.0] for completion 1; a reward must be a number or None."),
    "tensor": (torch.tensor([1.0, 2.0]), "a reward must be a number or None."),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("background", [False, True])
def test_a_reward_that_is_no_finite_number_is_an_error_that_names_the_function(
    kind: str, background: bool, tmp_path: Any
) -> None:
    value, message = BAD[kind]

    def spoilt(completions: list[str], **_: Any) -> list[Any]:
        return [value if i == 1 else 0.0 for i in range(len(completions))]

    async def spoilt_later(completions: list[str], **_: Any) -> list[Any]:
        return spoilt(completions)

    function = spoilt_later if background else spoilt
    trainer = runs.build(tmp_path, rewards=[tiny.low_words, function])
    with pytest.raises(VariantError) as caught:
        trainer.train()
    assert str(caught.value).startswith(f"reward function '{function.__name__}' returned ")
    assert message in str(caught.value)


def test_a_function_that_returns_no_list_is_named(tmp_path: Any) -> None:
    def forgot(completions: list[str], **_: Any) -> None:
        return None

    with pytest.raises(VariantError) as caught:
        runs.trained(tmp_path, rewards=forgot)
    assert str(caught.value) == (
        "reward function 'forgot' returned NoneType; it must return a list with one number or None per completion."
    )


def test_too_few_rewards_are_an_error_that_names_the_function(tmp_path: Any) -> None:
    def few(completions: list[str], **_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match="reward function 'few' returned 1 rewards, but 8 were expected"):
        runs.trained(tmp_path, rewards=few)


def judged(folder: Any, judge: Any, **settings: Any) -> runs.Watched:
    options = {"reward_processing_classes": [tiny.tokenizer(), None]}
    return runs.build(folder, rewards=[judge, tiny.low_words], options=options, max_steps=1, **settings)


def test_a_reward_model_scores_prompt_and_completion(tmp_path: Any) -> None:
    judge = runs.reward_model()
    trainer = judged(tmp_path, judge)
    trainer.train()
    rollout, _ = rollout_of(trainer)
    (output,) = trainer.generated
    words = tiny.tokenizer()
    for row in range(2):
        prompt = words.decode(output["prompt_ids"][row][output["prompt_mask"][row].bool()])
        text = prompt + words.decode(output["completion_ids"][row], skip_special_tokens=True)
        with torch.no_grad():
            expected = judge(**words(text, return_tensors="pt")).logits[0, 0]
        assert rollout.rewards_per_func[row, 0] == pytest.approx(float(expected), abs=1e-5)
    assert rollout.reward_names == ("judge", "low_words")
    assert "rewards/judge/mean" in trainer.logs[0]


def test_a_reward_model_that_gives_no_finite_number_is_named(tmp_path: Any) -> None:
    judge = runs.reward_model()
    torch.nn.init.constant_(judge.score.weight, math.nan)
    with pytest.raises(VariantError) as caught:
        judged(tmp_path, judge).train()
    assert str(caught.value) == "reward model 'judge' returned a value that is not finite."


# -- what is logged ------------------------------------------------------------------------------------------------


def test_the_logged_reward_is_the_weighted_one_that_is_trained(tmp_path: Any) -> None:
    # pains B21: weights .7 and .3, rewards 1 and 0.
    trainer = runs.trained(
        tmp_path, "grpo", rewards=[by_place([1.0]), by_place([0.0])], reward_weights=[0.7, 0.3], max_steps=1
    )
    assert trainer.logs[0]["reward"] == pytest.approx(0.7)
    assert rollout_of(trainer)[0].rewards.tolist() == pytest.approx([0.7] * 8)


def test_groups_of_equal_rewards_are_counted_and_get_exactly_nothing(tmp_path: Any) -> None:
    # 0.7 eight times: in float32 the mean is not 0.7, TRL finds a spread of 6e-8 and counts no such group.
    rewards = by_place([0.7] * 8 + [1] + [0] * 7)
    trainer = runs.trained(tmp_path, "grpo", rewards=rewards, num_generations=8, steps_per_generation=4, max_steps=1)
    assert trainer.logs[0]["frac_reward_zero_std"] == 0.5
    assert rollout_of(trainer)[1].advantages[:8].tolist() == [0] * 8


def test_shaping_is_logged_apart_from_the_reward_itself(tmp_path: Any) -> None:
    # Completions of 1, 5, 7 and 8 tokens, limit 8, cache 4: penalties 0, -0.25, -0.75, -1; their mean is -0.5.
    lengths = [1, 5, 7, 8]

    def write(prompt: str, index: int) -> list[int]:
        return [5] * lengths[index]

    trainer = runs.trained(
        tmp_path,
        "dapo",
        rewards=by_place([1, 0, 0, 0]),
        options={"rollout_func": runs.scripted(write)},
        variant_overrides={"reward_shaper": {"name": "soft_overlong", "cache": 4}, "advantage_normalizer": "none"},
        max_steps=1,
    )
    _, result = rollout_of(trainer)
    shaped = [1.0, -0.25, -0.75, -1.0]
    assert result.rewards.tolist() == pytest.approx(shaped * 2)
    assert result.advantages.tolist() == pytest.approx([r + 0.25 for r in shaped] * 2)
    assert trainer.logs[0]["reward"] == pytest.approx(0.25)
    assert trainer.logs[0]["reward_shaped"] == pytest.approx(-0.25)


@pytest.mark.parametrize("variant", ["grpo", "reinforce_pp"])
def test_the_completions_table_shows_the_advantages_that_are_trained(variant: str, tmp_path: Any) -> None:
    trainer = runs.trained(tmp_path, variant, log_completions=True, max_steps=1)
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    rollout, result = rollout_of(trainer)
    advantages = result.advantages
    if advantages.dim() == 2:  # per token: their mean over the completion's tokens
        advantages = torch.tensor([row[mask].mean().item() for row, mask in zip(advantages, rollout.mask, strict=True)])
    assert table["advantage"].tolist() == pytest.approx(advantages.tolist(), abs=1e-6)
    assert table["low_words"].tolist() == pytest.approx(rollout.rewards.tolist())
    assert len(table) == 8 and any(table["advantage"])


def test_a_nan_metric_of_one_step_does_not_wipe_the_window(tmp_path: Any) -> None:
    # pains B20: the first of two rollouts has no reward at all.
    seen = []

    def second_time(completions: list[str], **_: Any) -> list[float | None]:
        seen.append(1)
        return [None if len(seen) == 1 else float(i % 2) for i in range(len(completions))]

    trainer = runs.trained(tmp_path, "grpo", rewards=second_time, logging_steps=2, max_steps=2)
    (entry,) = trainer.logs
    assert entry["reward"] == 0.5 and entry["rewards/second_time/mean"] == 0.5
    assert all(value is None or math.isfinite(value) for value in entry.values())
