"""The groups that wait for the next rollout, and how a rollout is filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_variants.trainer.rows import count
from trl_variants.trainer.surplus import Surplus, plain, select

NUMBERS = st.integers(0, 20)


@given(NUMBERS, NUMBERS, st.integers(1, 20))
def test_a_rollout_is_filled_as_far_as_there_are_groups(kept: int, spare: int, groups: int) -> None:
    trained, surplus, filled = select(kept, spare, groups)
    assert trained + surplus == kept and filled <= spare
    assert trained + filled == min(groups, kept + spare)
    assert not (surplus and filled)  # nothing waits while a dropped group takes its place


def waiting(*ages: int) -> dict[str, Any]:
    """Groups of two rows, each with an age and a name."""
    return {
        "age": torch.tensor([age for age in ages for _ in range(2)]),
        "prompt": [f"{index}" for index in range(len(ages)) for _ in range(2)],
    }


def test_groups_enter_in_order_and_the_surplus_is_then_empty() -> None:
    surplus = Surplus(max_age=2, generations=2)
    assert surplus.enter() == ([], 0)
    assert surplus.hold(waiting(0, 2, 1, 0)) == 0
    (rows,), dropped = surplus.enter()
    assert rows["prompt"] == ["0", "0", "2", "2", "3", "3"] and rows["age"].tolist() == [1, 1, 2, 2, 1, 1]
    assert dropped == 1 and surplus.rows is None


@pytest.mark.parametrize("max_age", [0, 1])
def test_where_none_may_wait_all_are_dropped_and_counted(max_age: int) -> None:
    surplus = Surplus(max_age, generations=2)
    assert surplus.hold(waiting(0, 0, 0)) == (0 if max_age else 3)
    assert (surplus.rows is None) == (max_age == 0)
    surplus.rows = waiting(0, 0)  # from a checkpoint
    entered, dropped = surplus.enter()
    assert sum(map(count, entered)) == 4 * max_age and dropped == 2 * (1 - max_age)


def test_an_empty_surplus_holds_nothing() -> None:
    surplus = Surplus(max_age=1, generations=2)
    assert surplus.hold(waiting()) == 0 and surplus.rows is None


def test_what_a_checkpoint_cannot_hold_becomes_text() -> None:
    tensor = torch.ones(2)
    value = plain({"a": [1, (2.5, None)], 3: {"b": True, "c": object}, "t": tensor})
    assert value == {"a": [1, [2.5, None]], "3": {"b": True, "c": "<class 'object'>"}, "t": tensor}
