"""Rollout, Batch, Totals and Metric: what is checked, cast and selected away at the boundary."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from trl_variants import Batch, Rollout, Totals, VariantError
from trl_variants.data import Metric
from trl_variants.testing import make_batch, make_rollout


def rollout_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "rewards": torch.zeros(2),
        "scored": torch.ones(2),
        "rewards_per_func": torch.zeros(2, 1),
        "reward_weights": torch.ones(1),
        "group_ids": torch.zeros(2),
        "mask": torch.ones(2, 3),
        "lengths": torch.ones(2),
        "truncated": torch.zeros(2),
        "has_eos": torch.ones(2),
        "max_length": 3,
    }
    return {**fields, **changes}


def batch_fields(**changes: Any) -> dict[str, Any]:
    mask = torch.ones(2, 3)
    return {"log_probs": -mask, "mask": mask, "advantages": torch.ones(2), "totals": Totals.of(mask), **changes}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (Rollout, {"rewards": torch.zeros(3)}, "Rollout.rewards has shape (3,); expected (2)."),
        (Rollout, {"rewards": [0.0, 1.0]}, "Rollout.rewards must be a tensor, not list."),
        (Rollout, {"mask": torch.ones(2)}, "Rollout.mask has shape (2,); expected (any, any)."),
        (Rollout, {"values": torch.zeros(2, 4)}, "Rollout.values has shape (2, 4); expected (2, 3)."),
        (Rollout, {"log_probs": torch.zeros(2, 3, 1)}, "Rollout.log_probs has shape (2, 3, 1); expected (2, 3)."),
        (Rollout, {"group_ids": torch.zeros(2, 1)}, "Rollout.group_ids has shape (2, 1); expected (2)."),
        (Rollout, {"final_values": torch.zeros(2, 1)}, "Rollout.final_values has shape (2, 1); expected (2)."),
        (
            Rollout,
            {"rewards_per_func": torch.zeros(2, 2)},
            "Rollout.rewards_per_func has shape (2, 2); expected (2, 1).",
        ),
        (
            Rollout,
            {"rewards": torch.tensor([0.0, math.nan])},
            "Rollout.rewards holds a value that is not finite, at a completion that is scored.",
        ),
        (
            Rollout,
            {"rewards": torch.tensor([0.0, math.inf])},
            "Rollout.rewards holds a value that is not finite, at a completion that is scored.",
        ),
        (Batch, {"log_probs": torch.zeros(2, 2)}, "Batch.log_probs has shape (2, 2); expected (2, 3)."),
        (Batch, {"entropies": 0.5}, "Batch.entropies must be a tensor, not float."),
        (
            Batch,
            {"advantages": torch.zeros(2, 2)},
            "Batch.advantages has shape (2, 2); expected (2, 3) or (2, 1) or (2).",
        ),
        (Batch, {"rewards": torch.zeros(2, 1)}, "Batch.rewards has shape (2, 1); expected (2)."),
    ],
)
def test_a_wrong_shape_or_type_is_named(kind: type, changes: dict, message: str) -> None:
    fields = rollout_fields(**changes) if kind is Rollout else batch_fields(**changes)
    with pytest.raises(VariantError) as error:
        kind(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.long, torch.float32),
    ],
)
def test_floats_are_at_least_float32_and_float64_stays(given: torch.dtype, kept: torch.dtype) -> None:
    table = torch.ones(2, 3).to(given)
    rollout = Rollout(**rollout_fields(rewards=table[:, 0], values=table, log_probs=table))
    batch = Batch(**batch_fields(log_probs=table, advantages=table[:, :1], entropies=table))
    for value in (rollout.rewards, rollout.values, rollout.log_probs, batch.log_probs, batch.advantages):
        assert value.dtype == kept
    assert batch.old_log_probs.dtype == kept
    assert rollout.mask.dtype == rollout.scored.dtype == torch.bool
    assert rollout.group_ids.dtype == torch.long


def test_gradients_reach_half_precision_log_probs() -> None:
    log_probs = torch.full((1, 2), -1.0, dtype=torch.bfloat16, requires_grad=True)
    make_batch(advantages=[1.0], log_probs=log_probs).log_probs.sum().backward()
    assert log_probs.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 200.0])
def test_masked_positions_are_zero_in_value_and_gradient(junk: float) -> None:  # pains F13
    mask = torch.tensor([[True, False], [False, False]])
    table = torch.tensor([[-1.0, junk], [junk, junk]], requires_grad=True)
    batch = make_batch(advantages=[1.0, junk], log_probs=table, entropies=table, mask=mask)
    assert batch.log_probs.tolist() == [[-1.0, 0.0], [0.0, 0.0]]
    assert batch.advantages.tolist() == [[1.0], [0.0]]
    (batch.log_probs.exp() + batch.entropies).sum().backward()
    assert table.grad.isfinite().all()
    assert table.grad[~mask].tolist() == [0.0, 0.0, 0.0]
    rollout = make_rollout([1.0, 2.0], mask=mask, values=table.detach())
    assert rollout.values.tolist() == [[-1.0, 0.0], [0.0, 0.0]]


def test_the_reward_of_an_unscored_completion_is_zero() -> None:
    rollout = make_rollout([math.nan, 2.0], scored=[False, True])
    assert rollout.rewards.tolist() == [0.0, 2.0]


def test_old_log_probs_are_the_current_ones_where_left_out() -> None:
    log_probs = torch.full((1, 2), -1.0, requires_grad=True)
    batch = make_batch(advantages=[1.0], log_probs=log_probs)
    assert not batch.old_log_probs.requires_grad
    assert batch.old_log_probs.tolist() == [[-1.0, -1.0]]


def test_advantages_per_completion_become_a_column() -> None:
    assert make_batch(advantages=[1.0, 2.0], lengths=[2, 2]).advantages.tolist() == [[1.0], [2.0]]


def test_nothing_can_be_assigned_to() -> None:
    for value in (make_batch(advantages=[1.0]), make_rollout([1.0]), Totals(1, 1, 1)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.max_length = 3  # type: ignore[misc]


def test_totals_count_tokens_sequences_and_rows_apart() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    totals = Totals.of(mask)
    assert dataclasses.astuple(totals) == (6.0, 2.0, 3.0, 1, 4)
    assert Totals.of(mask, max_length=512).max_length == 512


def test_a_batch_is_finite_where_it_must_be() -> None:
    good = {"advantages": [1.0], "log_probs": [[-1.0, -1.0]]}
    assert make_batch(**good).sum_of_all().isfinite()
    unknown = make_batch(**good, sampling_log_probs=[[math.nan, -1.0]])  # an engine may not know
    assert unknown.sum_of_all().isfinite()
    assert make_batch(**good, ref_log_probs=[[-1.0, math.nan]], mask=[[1, 0]]).sum_of_all().isfinite()
    for name in ("old_log_probs", "ref_log_probs", "entropies", "values", "old_values", "returns"):
        assert not make_batch(**good, **{name: [[-1.0, -math.inf]]}).sum_of_all().isfinite()


def test_a_metric_is_a_mean_or_an_extreme_and_nan_of_nothing() -> None:
    assert float(Metric(torch.tensor(6.0), torch.tensor(4))) == 1.5
    assert float(Metric(torch.tensor(6.0), torch.tensor(4), "max")) == 6.0
    assert math.isnan(float(Metric(torch.tensor(0.0), torch.tensor(0))))
    assert math.isnan(float(Metric(torch.tensor(math.inf), torch.tensor(0), "min")))


def test_make_rollout_and_make_batch_fill_in_what_is_left_out() -> None:
    rollout = make_rollout([1.0, 0.0, 1.0, 0.0], group_size=2, lengths=[1, 3, 2, 3])
    assert rollout.group_ids.tolist() == [0, 0, 1, 1]
    assert rollout.mask.sum(1).tolist() == [1, 3, 2, 3]
    assert rollout.max_length == 3
    assert rollout.scored.all()
    assert make_rollout(torch.zeros(2)).rewards.dtype == torch.float32  # a tensor keeps its dtype
    batch = make_batch(advantages=[1.0, -1.0], lengths=[1, 3], max_length=8)
    assert batch.log_probs.tolist() == [[-1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]
    assert dataclasses.astuple(batch.totals) == (4.0, 2.0, 2.0, 1, 8)


def test_the_first_rows_of_a_rollout_are_a_rollout() -> None:
    whole = make_rollout([1.0, 2.0, 3.0, 4.0], group_size=2, lengths=[1, 2, 3, 1], values=torch.arange(12.0).view(4, 3))
    first = whole.first(2)
    assert first.rewards.tolist() == [1, 2] and first.group_ids.tolist() == [0, 0]
    assert first.mask.shape == (2, 3) and first.rewards_per_func.shape == (2, 1)
    assert torch.equal(first.values, whole.values[:2]) and first.log_probs is None
    assert torch.equal(first.reward_weights, whole.reward_weights) and first.max_length == whole.max_length
    assert whole.first(4).rewards.tolist() == whole.rewards.tolist()
