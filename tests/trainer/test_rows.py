"""Rows of a generation batch: padding stays where it belongs, and no row changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from trl_variants import VariantError
from trl_variants.trainer.rows import count, gather, join, move, own_old_log_probs, take, trim

PAD = 9


def batch(prompts: list[list[int]], completions: list[list[int]], **more: Any) -> dict[str, Any]:
    """Rows as TRL pads them: prompts on the left, completions on the right."""
    p, t = max(map(len, prompts)), max(map(len, completions))
    return {
        "prompt_ids": torch.tensor([[PAD] * (p - len(x)) + x for x in prompts]),
        "prompt_mask": torch.tensor([[0] * (p - len(x)) + [1] * len(x) for x in prompts]),
        "completion_ids": torch.tensor([x + [PAD] * (t - len(x)) for x in completions]),
        "completion_mask": torch.tensor([[1] * len(x) + [0] * (t - len(x)) for x in completions]),
        **more,
    }


A = batch([[1], [2, 3]], [[4], [5]], prompt=["a", "b"])
B = batch([[6, 7, 8]], [[1, 2, 3]], prompt=["c"])


def test_joined_rows_have_one_width_prompts_on_the_right_completions_on_the_left() -> None:
    both = join([A, B], PAD)
    assert both["prompt_ids"].tolist() == [[PAD, PAD, 1], [PAD, 2, 3], [6, 7, 8]]
    assert both["prompt_mask"].tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 1]]
    assert both["completion_ids"].tolist() == [[4, PAD, PAD], [5, PAD, PAD], [1, 2, 3]]
    assert both["completion_mask"].tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 1]]
    assert both["prompt"] == ["a", "b", "c"] and count(both) == 3


def test_taking_rows_and_trimming_gives_back_what_was_joined() -> None:
    both = join([A, B], PAD)
    for part, index in ((A, [0, 1]), (B, [2])):
        again = trim(take(both, index))
        assert again.keys() == part.keys()
        for name, value in part.items():
            assert again[name] == value if isinstance(value, list) else torch.equal(again[name], value)
    assert take(both, [2, 0])["prompt"] == ["c", "a"]
    assert take({"n": torch.tensor(3), "x": torch.arange(3)}, [2])["n"] == 3


def test_trimmed_widths_stay_multiples() -> None:
    wide = join([A, batch([[1] * 8], [[1] * 8], prompt=["d"])], PAD)
    trimmed = trim(take(wide, [0, 1]), 4)
    assert trimmed["prompt_ids"].shape == trimmed["completion_ids"].shape == (2, 4)
    assert trimmed["prompt_ids"][1].tolist() == [PAD, PAD, 2, 3]


def test_what_only_some_rollouts_have_is_filled_in_with_what_means_none() -> None:
    more = {
        "tool_mask": torch.tensor([[1, 0, 1]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, -2.0, -3.0]]),
        "carried": torch.tensor([True]),
        "carried_log_probs": torch.tensor([[-1.5, -2.5, -3.5]]),
        "age": torch.tensor([1]),
        "extra/note": ["x"],
    }
    both = join([{**B, **more}, A], PAD)
    assert both["tool_mask"].tolist() == [[1, 0, 1], [1, 1, 1], [1, 1, 1]]
    assert both["sampling_per_token_logps"][0].tolist() == [-1, -2, -3]
    assert both["sampling_per_token_logps"][1:, 0].isnan().all()  # NaN: the engine did not say
    assert both["carried"].tolist() == [True, False, False] and both["age"].tolist() == [1, 0, 0]
    assert both["carried_log_probs"].tolist() == [[-1.5, -2.5, -3.5], [0, 0, 0], [0, 0, 0]]
    assert both["extra/note"] == ["x", None, None]


def test_what_is_filled_in_is_as_wide_as_the_longest_completion_of_all() -> None:
    # The carried rows are the short ones.
    own = {"carried": torch.ones(2, dtype=torch.bool), "carried_log_probs": torch.full((2, 1), -1.5)}
    both = join([{**A, **own}, B], PAD)
    assert both["carried_log_probs"].tolist() == [[-1.5, 0, 0], [-1.5, 0, 0], [0, 0, 0]]
    assert both["carried"].tolist() == [True, True, False]


def test_a_tool_mask_is_padded_as_trl_pads_it() -> None:
    both = join([{**A, "tool_mask": torch.tensor([[0], [1]])}, {**B, "tool_mask": torch.tensor([[1, 0, 1]])}], PAD)
    assert both["tool_mask"].tolist() == [[0, 1, 1], [1, 1, 1], [1, 0, 1]]


def test_rows_without_what_every_rollout_has_are_an_error() -> None:
    with pytest.raises(VariantError, match="Rows with and without prompt_mask cannot be joined."):
        join([A, {name: value for name, value in B.items() if name != "prompt_mask"}], PAD)


def test_old_log_probs_are_the_rows_own_where_they_were_carried() -> None:
    now = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.bfloat16)
    assert own_old_log_probs({}, now) is now
    carried = {"carried": torch.tensor([False, True]), "carried_log_probs": torch.tensor([[0.0, 0.0], [-5.1, -6.1]])}
    old = own_old_log_probs(carried, now)
    assert old.dtype is torch.float32  # nothing is lost of either
    assert torch.equal(old[0], now[0].float()) and torch.equal(old[1], carried["carried_log_probs"][1])


def test_one_process_gathers_nothing_and_lists_do_not_move() -> None:
    assert gather(A, Accelerator(cpu=True), PAD) == A
    assert move(A, "cpu")["prompt"] is A["prompt"]
    assert math.isclose(float(move(A, "cpu")["prompt_ids"].sum()), float(A["prompt_ids"].sum()))
