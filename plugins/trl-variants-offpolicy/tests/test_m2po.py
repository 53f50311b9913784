"""M2PO: which tokens the second moment masks, on one rank and on several of different widths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trl_variants_offpolicy.m2po import m2po, second_moment_mask

from tests.components.common import checked, close, double, tables
from trl_variants import load_registry, resolve
from trl_variants.testing import make_batch, on_ranks

REGISTRY = load_registry("none", extra=["trl_variants_offpolicy"])


def alone(tensor: Tensor) -> Tensor:
    return tensor


# log r, A, threshold -> which are masked
MASKED = [
    # squares .01, .04, .16: mean .07; without .16 it is .025
    ([0.1, 0.2, 0.4], [1.0, 1.0, 1.0], 0.04, [False, False, True]),
    ([-0.1, -0.2, -0.4], [-1.0, -1.0, -1.0], 0.04, [False, False, True]),
    # .01, .25, .36: .2067, .13, .01
    ([0.5, 0.6, 0.1], [1.0, 1.0, 1.0], 0.04, [True, True, False]),
    # .25 alone is above: nothing need be left
    ([0.5], [1.0], 0.04, [True]),
    # Ties go together: .09, .09, .01 have the mean .0633, and without one .09 it would be .05
    ([0.3, 0.3, 0.1], [1.0, 1.0, 1.0], 0.055, [True, True, False]),
    # On the way back, or A = 0: neither counted nor masked. Left is .04, and .01 beside.
    ([-2.0, 2.0, 2.0, 0.2, 0.1], [1.0, -1.0, 0.0, 1.0, 1.0], 0.04, [False] * 5),
    # Exactly the threshold is kept: .25 and .25, all exact in binary
    ([0.5, 0.5], [1.0, 1.0], 0.25, [False, False]),
]


@pytest.mark.parametrize(("log_ratio", "advantages", "threshold", "masked"), MASKED)
def test_m2po_by_hand(log_ratio: list, advantages: list, threshold: float, masked: list) -> None:
    log_probs, engine = double([log_ratio]).requires_grad_(), torch.zeros(1, len(log_ratio), dtype=torch.float64)
    a, mask = double([advantages]), torch.ones(1, len(log_ratio))
    result = m2po(log_probs, engine - 5, a, mask, alone, engine, threshold=threshold)
    result.loss.sum().backward()
    assert (result.low | result.high).tolist() == [masked]
    assert result.low.tolist() == [[m and x < 0 for m, x in zip(masked, advantages, strict=True)]]
    # -r A and its gradient -r A, or nothing
    expected = -double([log_ratio]).exp() * a * ~torch.tensor([masked])
    close(result.loss, expected)
    close(log_probs.grad, expected)
    # Where the engine gives nothing, the old policy stands in.
    close(m2po(log_probs, engine, a, mask, alone, threshold=threshold).loss, expected)


def test_the_loss_keeps_its_denominator() -> None:
    log_probs = double([[0.1, 0.2, 0.4]]).requires_grad_()
    batch = make_batch(advantages=[1.0], log_probs=log_probs, old_log_probs=torch.zeros(1, 3, dtype=torch.float64))
    result = resolve("m2po", None, REGISTRY).loss(batch)
    result.loss.backward()
    close(log_probs.grad, -double([[0.1, 0.2, 0.4]]).exp() * double([[1, 1, 0]]).double() / 3)
    assert float(result.metrics["clip_ratio/high_mean"]) == pytest.approx(1 / 3)


def masked_by_a_loop(squares: list[float], threshold: float) -> float:
    """The square from which on all are masked: the largest of what is left goes, with its equals, until all is well."""
    left = sorted(squares)
    while left and sum(left) / len(left) > threshold:
        left = [square for square in left if square < left[-1]]
    return left[-1] if left else -1.0


@checked
@given(tables("now", "old"), st.sampled_from([0.0401, 0.517, 3.01]), st.data())
def test_m2po_equals_a_loop(table: dict, threshold: float, data: st.DataObject) -> None:
    rows = len(table["mask"])
    advantages = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=rows, max_size=rows))
    counted: dict[tuple[int, int], float] = {}
    for i, valid in enumerate(table["mask"]):
        for t, counts in enumerate(valid):
            gap = table["now"][i][t] - table["old"][i][t]
            if counts and gap * advantages[i] > 0:
                counted[i, t] = gap**2
    most = masked_by_a_loop(list(counted.values()), threshold)
    mask = torch.tensor(table["mask"])
    result = m2po(
        double(table["now"]), double(table["old"]), double(advantages)[:, None], mask, alone, threshold=threshold
    )
    got = {(i, t) for i, t in (result.low | result.high).nonzero().tolist()}
    assert got == {place for place, square in counted.items() if square > most}


@checked
@given(tables("old", "engine"), st.sampled_from([0.0401, 0.517, 3.01]))
def test_areals_mask_counts_every_token_of_old_and_sampler(table: dict, threshold: float) -> None:
    counted = {
        (i, t): (table["old"][i][t] - table["engine"][i][t]) ** 2
        for i, valid in enumerate(table["mask"])
        for t, counts in enumerate(valid)
        if counts
    }
    most = masked_by_a_loop(list(counted.values()), threshold)
    mask = torch.tensor(table["mask"])
    weight = second_moment_mask(double(table["old"]), mask, alone, double(table["engine"]), threshold=threshold)
    for (i, t), square in counted.items():
        assert weight[i, t].item() == float(square <= most)
    assert second_moment_mask(double(table["old"]), mask, alone) is None


# -- several ranks -----------------------------------------------------------------------------------------------------


def test_the_moment_is_that_of_all_ranks_whatever_their_widths() -> None:
    # Squares .0025, .16 | .04, .0441, .0484: mean .059, without .16 it is .03375. The second rank alone has .0442, then
    # .04205, then .04. The third has nothing that counts.
    rows = [[[0.05, 0.4]], [[0.2, 0.21, 0.22]], [[-1.0]]]

    def call(row: list) -> Callable[[Callable[[Tensor], Tensor]], Any]:
        now = double(row)
        old, advantages, mask = torch.zeros_like(now), double([[1.0]]), torch.ones(now.shape)
        return lambda gather: m2po(now, old, advantages, mask, gather, threshold=0.041).high.tolist()

    assert on_ranks([call(row) for row in rows]) == [[[False, True]], [[False] * 3], [[False]]]
    (second,) = on_ranks([call(rows[1])])
    assert second == [[False, True, True]]
