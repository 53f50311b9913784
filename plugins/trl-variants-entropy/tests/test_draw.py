"""The draw is random in looks only: the tokens decide it and the step, not rows, ranks, padding, rounding or a seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trl_variants_entropy
from torch import Tensor
from trl_variants_entropy.choice import _mixed, least, token_keys
from trl_variants_entropy.covariance import _largest, clip_cov, kl_cov

from trl_variants import resolve
from trl_variants.data import Batch, ClipResult, Totals
from trl_variants.registry import Owner, load_registry
from trl_variants.testing import on_ranks

REGISTRY = load_registry("none")
REGISTRY.add(trl_variants_entropy, Owner("trl-variants-entropy", "trl_variants_entropy", "0.1.0"))
#: Bounds that all tokens are within, and a share of a tenth.
WIDE = {"clip_cov_ratio": 0.1, "clip_cov_lb": -1e9, "clip_cov_ub": 1e9}
ROWS, WIDTH = 8, 10


def made_up(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs, advantages (B, 1) and a mask of rows from 3 to 10 tokens."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -2 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    old = log_probs + 0.3 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    advantages = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    mask = torch.arange(WIDTH) < torch.arange(3, 3 + ROWS)[:, None]
    return log_probs.to(dtype), old.to(dtype), advantages.to(dtype), mask


def alone(tensor: Tensor) -> Tensor:
    return tensor


def drawn(log_probs: Tensor, advantages: Tensor, mask: Tensor, step: int = 0, gather: Any = alone) -> Tensor:
    return clip_cov(torch.zeros_like(log_probs), log_probs, advantages, mask, gather, step, **WIDE).dual


def test_the_same_call_draws_the_same_whatever_the_global_generator_holds() -> None:
    log_probs, _, advantages, mask = made_up()
    first = drawn(log_probs, advantages, mask)
    torch.manual_seed(123)
    torch.rand(10)
    assert torch.equal(drawn(log_probs, advantages, mask), first)
    assert int(first.sum()) == 5  # a tenth of 3 + 4 + ... + 10 = 52


def test_rows_in_another_order_and_more_padding_draw_the_same_tokens() -> None:
    log_probs, _, advantages, mask = made_up()
    first, order = drawn(log_probs, advantages, mask), torch.tensor([5, 0, 7, 2, 1, 6, 4, 3])
    assert torch.equal(drawn(log_probs[order], advantages[order], mask[order]), first[order])
    wider = (torch.nn.functional.pad(x, (0, 4), value=float(x.dtype.is_floating_point)) for x in (log_probs, mask))
    assert torch.equal(drawn(next(wider), advantages, next(wider))[:, :WIDTH], first)


def test_rounding_of_a_log_prob_moves_no_key() -> None:
    log_probs, _, advantages, mask = made_up()
    near = log_probs + 1e-9 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(token_keys(near, advantages, mask, 0), token_keys(log_probs, advantages, mask, 0))
    single = token_keys(log_probs.float(), advantages.float(), mask, 0)
    assert float((single == token_keys(log_probs, advantages, mask, 0)).double().mean()) > 0.98


def test_every_token_is_drawn_as_often_as_the_share_says() -> None:
    log_probs, _, advantages, mask = made_up()
    steps = 2000
    times = torch.stack([drawn(log_probs, advantages, mask, step) for step in range(steps)])
    assert not times[:, ~mask].any()
    often = times[:, mask].double().mean(0)
    # 5 of 52 is .0962; the standard deviation of a share of 2000 draws is .0066.
    assert float((often - 5 / 52).abs().max()) < 4 * 0.0066
    # Successive steps draw independently: the same token twice running as often as 5/52 squared, .0092, to .0003.
    twice = (times[1:] & times[:-1])[:, mask].double().mean()
    assert abs(float(twice) - (5 / 52) ** 2) < 4 * 0.0003


def test_keys_are_all_different_where_tokens_are() -> None:
    log_probs, _, advantages, mask = made_up()
    keys = token_keys(log_probs, advantages, mask, 0)[mask]
    assert len(keys.unique()) == len(keys)
    same = torch.full((3, 4), -0.5)  # log-probs all equal, as of tokens that are certain
    alike = token_keys(same, torch.tensor([[1.0], [1.0], [2.0]]), torch.ones(3, 4), 0)
    assert len(alike[1:].unique()) == 8  # position and advantage tell them apart
    assert torch.equal(alike[0], alike[1])  # and nothing else does


@pytest.mark.parametrize("rule", [clip_cov, kl_cov])
@pytest.mark.parametrize("cut", [[4], [1, 3], [2, 3, 7]])
def test_ranks_act_on_the_tokens_that_one_process_acts_on(rule: Any, cut: list[int]) -> None:
    whole = made_up()

    def act(rows: slice, width: int, gather: Any) -> ClipResult:
        now, old, advantages, mask = whole[0][rows, :width], whole[1][rows, :width], whole[2][rows], whole[3][rows]
        mask = mask[:, :width]
        if rule is kl_cov:
            return kl_cov(now - old, now, old, advantages, mask, gather, 5, kl_cov_ratio=0.1)
        return clip_cov(now - old, now, advantages, mask, gather, 5, **WIDE)

    alone_ = act(slice(0, ROWS), WIDTH, alone).loss
    ends = [0, *cut, ROWS]
    parts = [(slice(a, b), int(whole[3][a:b].sum(1).max())) for a, b in zip(ends, ends[1:], strict=False)]
    ranks = on_ranks([lambda g, r=r, w=w: act(r, w, g).loss for r, w in parts])  # each trimmed to its own width
    for (rows, width), loss in zip(parts, ranks, strict=True):
        valid = whole[3][rows, :width]
        torch.testing.assert_close(loss[valid], alone_[rows, :width][valid], rtol=1e-12, atol=1e-12)


def test_a_rank_without_tokens_takes_part() -> None:
    log_probs, _, advantages, mask = made_up()
    nothing = torch.zeros_like(mask[:1])
    calls = [
        lambda g: drawn(log_probs, advantages, mask, 0, g),
        lambda g: drawn(log_probs[:1], advantages[:1], nothing, 0, g),
    ]
    first, second = on_ranks(calls)
    assert torch.equal(first, drawn(log_probs, advantages, mask)) and not second.any()
    assert not drawn(log_probs[:1], advantages[:1], nothing).any()


@pytest.mark.parametrize("variant", ["clip_cov", "kl_cov", "forking_tokens", "skywork_or1"])
def test_ranks_add_up_to_the_loss_and_the_gradient_of_one_process(variant: str) -> None:
    """The whole recipe, one micro-batch for each rank."""
    now, old, advantages, mask = made_up()
    rules = {"clip_cov": {"clip_rule": WIDE}, "kl_cov": {"clip_rule": {"kl_cov_ratio": 0.1}}}
    recipe = resolve(variant, rules.get(variant), REGISTRY)
    entropies = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    totals = Totals.of(mask)

    def train(rows: slice, gather: Any) -> tuple[Tensor, Tensor]:
        leaf = now[rows].clone().requires_grad_()
        batch = Batch(
            log_probs=leaf,
            old_log_probs=old[rows],
            advantages=advantages[rows],
            mask=mask[rows],
            entropies=entropies[rows],
            totals=totals,
            step=4,
        )
        loss = recipe.loss(batch, gather=gather).loss
        loss.backward()
        return loss.detach(), leaf.grad

    loss, gradient = train(slice(0, ROWS), alone)
    ranks = on_ranks([lambda g, r=r: train(r, g) for r in (slice(0, 3), slice(3, ROWS))])
    torch.testing.assert_close(ranks[0][0] + ranks[1][0], loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([ranks[0][1], ranks[1][1]]), gradient, rtol=1e-12, atol=1e-12)


def test_least_by_hand() -> None:
    keys, among = torch.tensor([[5, 1, 3], [2, 2, 9]]), torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()
    assert least(keys, among, 1, alone).tolist() == [[False] * 3, [True, True, False]]  # equal keys together
    assert least(keys, among, 3, alone).tolist() == [[False, False, True], [True, True, False]]
    assert least(keys, among, 99, alone).tolist() == among.tolist()
    assert not least(keys, among, 0, alone).any() and not least(keys, among & False, 2, alone).any()


def test_the_hash_is_splitmix64() -> None:
    """The first numbers that the generator's reference gives for the seed 1234567; its state grows by 2⁶⁴/φ."""
    states = [1234567 + i * 0x9E3779B97F4A7C15 for i in range(5)]
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert _mixed(torch.tensor([signed(state) for state in states])).tolist() == [signed(number) for number in want]


def signed(number: int) -> int:
    """A 64-bit number as int64 holds it."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def test_the_largest_come_first_and_keys_decide_among_equal_ones_only() -> None:
    covariance, among = torch.tensor([[1.0, 3.0, 1.0, 1.0, 9.0]]), torch.tensor([[1, 1, 1, 1, 0]]).bool()
    keys = torch.tensor([[5, 7, 2, 9, 0]])
    found = [_largest(covariance, keys, among, number, alone).long().tolist() for number in range(5)]
    assert found[:4] == [[[0, 0, 0, 0, 0]], [[0, 1, 0, 0, 0]], [[0, 1, 1, 0, 0]], [[1, 1, 1, 0, 0]]]
    assert found[4] == [[1, 1, 1, 1, 0]]
