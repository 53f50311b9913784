"""The kit's check of reward functions: what it lets pass, and what it finds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from trl.rewards import get_repetition_penalty_reward, think_format_reward

from trl_variants.testing import NonConformance, check_reward_function

COUNT = itertools.count()


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def right(completions: Any, answer: Any, **_: Any) -> list[float | None]:
    return [None if a is None else float(text_of(c) == a) for c, a in zip(completions, answer, strict=True)]


async def later(completions: Any, trainer_state: Any, log_extra: Any, log_metric: Any, **_: Any) -> list[int]:
    log_extra("seen", [text_of(c) for c in completions])
    log_metric("step", float(trainer_state.global_step))
    return [len(text_of(c)) for c in completions]


class Judge:
    def __call__(self, completions: Any, **_: Any) -> list[float]:
        return [1.0 for _ in completions]


def test_what_conforms_passes_and_its_rewards_are_returned() -> None:
    assert check_reward_function(right, ["a", "b", "c"], answer=["a", "x", None]) == [1.0, 0.0, None]
    assert check_reward_function(later, ["a", "bcd"]) == [1.0, 3.0]
    assert check_reward_function(Judge(), ["a"]) == [1.0]
    assert check_reward_function(think_format_reward, ["<think>a</think>b", "b"], kinds=["conversation"]) == [1.0, 0.0]
    # Of two 3-grams, both of them 5 5 5, one is repeated: the penalty is 1/2.
    penalty = get_repetition_penalty_reward()
    assert check_reward_function(penalty, ["a"], completion_ids=[[5, 5, 5, 5]]) == [-0.5]


def changing(completions: Any, **_: Any) -> list[float]:
    completions.append("more")
    return [0.0] * (len(completions) - 1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions: [0.0], "'<lambda>' failed on a text: TypeError"),
        (lambda completions, **_: 1.0, "returned no list of numbers: 1.0"),
        (lambda completions, **_: ["good"], r"returned no list of numbers: \['good'\]"),
        (lambda completions, **_: [0.0, 0.0], "gave 2 rewards for 1 completions"),
        (lambda completions, **_: [float("nan")], "a reward is finite, or None"),
        (lambda completions, **_: [float(next(COUNT))], "for the same completions"),
        (lambda completions, **_: [float(isinstance(completions[0], str))], "for the same as conversations"),
        (changing, "'changing' changed its argument completions"),
        (think_format_reward, "'think_format_reward' failed on a text"),
    ],
)
def test_what_does_not_is_found(function: Any, message: str) -> None:
    with pytest.raises(NonConformance, match=message):
        check_reward_function(function, ["a"])
