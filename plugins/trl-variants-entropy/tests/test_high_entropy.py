"""The mask of high entropy: which tokens it keeps, over all ranks, and what it does to a loss."""

from __future__ import annotations

import math

import pytest
import torch
import trl_variants_entropy
from hypothesis import given
from hypothesis import strategies as st
from trl_variants_entropy.high_entropy import high_entropy_mask

from tests.components.common import checked, close, double, tables
from trl_variants import VariantError, resolve
from trl_variants.registry import Owner, load_registry
from trl_variants.testing import make_batch, on_ranks

REGISTRY = load_registry("none")
REGISTRY.add(trl_variants_entropy, Owner("trl-variants-entropy", "trl_variants_entropy", "0.1.0"))
ENTROPIES, MASK = [[0.1, 1.3, 0.5, 0.9], [0.6, 0.2, 9.0, math.nan]], [[1, 1, 1, 1], [1, 1, 0, 0]]


def alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize(
    ("share", "kept"),
    [  # six tokens in order: .1 .2 .5 .6 .9 1.3, at the places 0 to 5; τ stands at the place 5 (1 - share)
        (0.2, [[0, 1, 0, 1], [0, 0, 0, 0]]),  # place 4: τ = .9, and the token there is kept
        (0.5, [[0, 1, 0, 1], [1, 0, 0, 0]]),  # place 2.5: τ = .55
        (0.0, [[0, 1, 0, 0], [0, 0, 0, 0]]),  # place 5: τ = 1.3
        (1.0, [[1, 1, 1, 1], [1, 1, 0, 0]]),  # place 0: τ = .1
    ],
)
def test_the_mask_by_hand(share: float, kept: list[list[int]]) -> None:
    got = high_entropy_mask(double(ENTROPIES), torch.tensor(MASK), alone, top_entropy_quantile=share)
    close(got, torch.tensor(kept))


@checked
@given(tables("entropies"), st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.75, 1.0]))
def test_the_mask_equals_a_loop(table: dict, share: float) -> None:
    mask, entropies = table["mask"], [[abs(h) for h in row] for row in table["entropies"]]
    cells = [list(zip(row, valid, strict=True)) for row, valid in zip(entropies, mask, strict=True)]
    ascending = sorted(h for row in cells for h, m in row if m)
    threshold = math.inf
    if ascending:
        place = (1 - share) * (len(ascending) - 1)
        below, above = ascending[math.floor(place)], ascending[math.ceil(place)]
        threshold = below + (place - math.floor(place)) * (above - below)
    want = [[m and h >= threshold for h, m in row] for row in cells]
    got = high_entropy_mask(double(entropies), torch.tensor(mask), alone, top_entropy_quantile=share)
    assert got.bool().tolist() == want


@pytest.mark.parametrize("count", [1, 2, 7, 100, 12_345])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.3, 0.7, 1.0])
def test_the_threshold_is_torchs_quantile_in_float32(count: int, share: float) -> None:
    entropies = torch.randn(1, count, generator=torch.Generator().manual_seed(count)).abs()
    want = entropies >= torch.quantile(entropies, 1 - share)
    got = high_entropy_mask(entropies, torch.ones(1, count), alone, top_entropy_quantile=share)
    assert torch.equal(got.bool(), want)


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_neighbours_in_float32_fall_as_torchs_quantile_rounds(share: float) -> None:
    one = torch.tensor(1.0)
    entropies = torch.stack([one, torch.nextafter(one, torch.tensor(2.0))])[None]
    want = entropies >= torch.quantile(entropies, 1 - share)
    got = high_entropy_mask(entropies, torch.ones(1, 2), alone, top_entropy_quantile=share)
    assert torch.equal(got.bool(), want)


def test_the_quantile_is_over_all_ranks_which_hold_different_numbers_of_tokens() -> None:
    rows = [(double(ENTROPIES[:1]), torch.tensor(MASK[:1])), (double([[0.6, 0.2]]), torch.tensor([[1, 1]]))]
    first, second = on_ranks([lambda g, e=e, m=m: high_entropy_mask(e, m, g) for e, m in rows])
    close(first, [[0, 1, 0, 1]])  # as in one process
    close(second, [[0, 0]])  # alone, this rank would keep its .6


def test_a_rank_without_tokens_takes_part_and_none_at_all_is_no_error() -> None:
    empty = (double([[5.0]]), torch.tensor([[0]]))
    rows = [(double(ENTROPIES), torch.tensor(MASK)), empty]
    first, second = on_ranks([lambda g, e=e, m=m: high_entropy_mask(e, m, g) for e, m in rows])
    close(first, [[0, 1, 0, 1], [0, 0, 0, 0]])
    close(second, [[0]])
    close(high_entropy_mask(*empty, alone), [[0]])


def test_what_is_left_out_keeps_its_place_in_the_denominator_and_its_kl() -> None:
    weight = {"token_weight": {"name": "high_entropy_mask", "top_entropy_quantile": 0.0}}
    log_probs = double([[-1.0, -1.0]]).requires_grad_()
    batch = make_batch(advantages=[3.0], log_probs=log_probs, entropies=[[0.5, 2.0]], ref_log_probs=[[-1.5, -1.5]])
    kl = {"kl": {"estimator": "k2", "coef": 1.0}}
    result = resolve("grpo", {**weight, **kl}, REGISTRY).loss(batch)
    result.loss.backward()
    close(result.loss, (0.125 - 3.0 + 0.125) / 2)  # k2 = .5² / 2 on both tokens, -A on the second; two tokens
    close(log_probs.grad, [[0.25, (-3.0 + 0.5) / 2]])  # d k2 = .5


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(VariantError) as error:
        resolve(
            "forking_tokens", {"token_weight": {"name": "high_entropy_mask", "top_entropy_quantile": share}}, REGISTRY
        )
    assert str(error.value) == (
        f"token_weight 'high_entropy_mask': top_entropy_quantile ({share}) is a share of the tokens, so between 0 and "
        "1."
    )
