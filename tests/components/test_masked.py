"""The arithmetic under the components: masks, groups and bounded exponentials."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.components.common import checked, close, double, groups, tables
from trl_variants.components import masked

JUNK = [math.nan, math.inf, -math.inf, 1e300]


@pytest.mark.parametrize("junk", JUNK)
def test_select_keeps_junk_out_of_value_and_gradient(junk: float) -> None:  # pains F13
    x = double([2.0, junk]).requires_grad_()
    (masked.select(x, torch.tensor([True, False])) * double([3.0, junk])[:1]).sum().backward()
    close(x.grad, [3.0, 0.0])


@pytest.mark.parametrize("junk", JUNK)
def test_sums_means_and_deviations_do_not_see_junk(junk: float) -> None:
    x, mask = double([[1.0, 3.0, junk], [junk, 5.0, junk]]), torch.tensor([[1, 1, 0], [0, 1, 0]])
    close(masked.masked_sum(x, mask), 9.0)
    close(masked.masked_sum(x, mask, dim=1), [4.0, 5.0])
    close(masked.masked_mean(x, mask), 3.0)
    close(masked.masked_mean(x, mask, dim=1), [2.0, 5.0])
    close(masked.masked_std(x, mask), math.sqrt(8 / 3))  # (4 + 0 + 4) / 3
    close(masked.masked_std(x, mask, correction=1), 2.0)  # (4 + 0 + 4) / 2


def test_nothing_left_gives_zero_not_nan() -> None:
    x, mask = double([[math.nan, 1.0]]), torch.zeros(1, 2)
    assert masked.masked_mean(x, mask) == 0
    assert masked.masked_std(x, mask, correction=1) == 0
    close(masked.masked_mean(x, mask, dim=1), [0.0])


def test_bounded_exp_is_bounded_in_value_and_gradient() -> None:
    x = double([0.5, 19.0, 25.0, 200.0, -200.0]).requires_grad_()
    y = masked.bounded_exp(x)
    y.sum().backward()
    close(y, [math.exp(0.5), math.exp(19), math.exp(20), math.exp(20), math.exp(-20)], atol=1e-6)
    close(x.grad, [math.exp(0.5), math.exp(19), 0.0, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("values", "constant"),
    [
        ([0.7] * 8, True),
        ([0.7, 0.7 + 9e-7], True),  # range <= 1e-6 max(1, |r|)
        ([0.7, 0.7 + 2e-6], False),
        ([1000.0, 1000.0 + 9e-4], True),
        ([1000.0, 1000.0 + 2e-3], False),
        ([-1000.0, -1000.0 + 9e-4], True),
        ([0.0, 5e-324], True),
        ([math.nan, math.nan], True),
        ([math.nan, 3.0], True),
        ([3.0], True),
    ],
)
def test_constant_means_equal_up_to_rounding(values: list[float], constant: bool) -> None:
    assert masked.is_constant(double([values])).tolist() == [constant]


@checked
@given(groups())
def test_a_group_table_holds_each_groups_scored_values_in_any_order_of_rows(data: tuple) -> None:
    rewards, scored, ids = data
    table, row = masked.group_table(double(rewards), torch.tensor(scored), torch.tensor(ids))
    for i, group in enumerate(ids):
        mine = [r for r, s, g in zip(rewards, scored, ids, strict=True) if s and g == group]
        held = [v for v in table[row[i]].tolist() if not math.isnan(v)]
        assert held == mine


@checked
@given(tables(), st.integers(1, 4))
def test_a_scalar_stands_on_the_last_policy_token(table: dict, value: int) -> None:
    mask = table["mask"]
    placed = masked.at_last_token(torch.full((len(mask),), float(value)), torch.tensor(mask))
    for row, valid in zip(placed.tolist(), mask, strict=True):
        last = max((t for t, m in enumerate(valid) if m), default=None)
        assert row == [float(value) if t == last else 0.0 for t in range(len(valid))]


def test_to_tokens_broadcasts_completions_and_leaves_tokens() -> None:
    mask = torch.ones(2, 3)
    close(masked.to_tokens(double([1.0, 2.0]), mask), [[1.0] * 3, [2.0] * 3])
    per_token = double([[1.0, 2.0, 3.0]] * 2)
    assert masked.to_tokens(per_token, mask) is per_token
