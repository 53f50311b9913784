"""Importance ratios: value, gradient, and what sequences make of their tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.components.common import checked, close, double, tables
from trl_variants import Variant, component, resolve
from trl_variants.components.clip_rules import ppo_clip
from trl_variants.components.ratios import no_ratio, sequence, sequence_sum, sequence_token, token
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch

REGISTRY = load_registry("none")
LN2 = math.log(2)


def gradient(ratio: object, log_probs: Tensor, *others: Tensor) -> Tensor:
    """d(sum of rho) / d(log pi)."""
    leaf = log_probs.clone().requires_grad_()
    ratio(leaf, *others).exp().sum().backward()
    return leaf.grad


def test_the_token_ratio_is_the_difference_of_log_probs() -> None:
    close(token(double([[-1.0, -2.0]]), double([[-1.5, -1.0]])), [[0.5, -1.0]])


def test_the_sequence_ratio_is_the_exponential_of_the_masked_mean() -> None:  # pains C06
    old, all_of_it = torch.zeros(1, 2), torch.ones(1, 2)
    close(sequence(double([[LN2, -LN2]]), old, all_of_it).exp(), [[1.0]])
    close(sequence(double([[LN2, LN2]]), old, all_of_it).exp(), [[2.0]])  # not 4
    close(sequence_sum(double([[LN2, LN2]]), old, all_of_it).exp(), [[4.0]])


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 200.0])
@pytest.mark.parametrize("ratio", [sequence, sequence_sum, sequence_token])
def test_junk_at_padding_and_tool_positions_has_no_effect(ratio: object, junk: float) -> None:
    mask = torch.tensor([[1, 0, 1, 0]])
    clean, old = double([[LN2, 0.0, LN2, 0.0]]), torch.zeros(1, 4).double()
    dirty, dirty_old = double([[LN2, junk, LN2, junk]]), double([[0.0, -junk, 0.0, junk]])
    kept = [0, 2] if ratio is sequence_token else [0]
    close(ratio(dirty, dirty_old, mask)[:, kept], ratio(clean, old, mask)[:, kept])
    if ratio is not sequence_token:
        close(gradient(ratio, dirty, dirty_old, mask), gradient(ratio, clean, old, mask))


def test_a_completion_without_tokens_has_the_ratio_one() -> None:
    empty = torch.zeros(1, 2)
    for ratio in (sequence, sequence_sum):
        close(ratio(double([[3.0, 4.0]]), torch.zeros(1, 2), empty), [[0.0]])


def test_gradients_say_whose_probability_moves_the_ratio() -> None:
    log_probs, old, mask = double([[LN2, LN2, 0.0]]), torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    close(gradient(token, log_probs, old), [[2.0, 2.0, 1.0]])
    close(gradient(sequence, log_probs, old, mask), [[1.0, 1.0, 0.0]])  # rho / |y| = 2 / 2
    close(gradient(sequence_sum, log_probs, old, mask), [[4.0, 4.0, 0.0]])  # rho = 4
    close(gradient(sequence_token, log_probs, old, mask), [[2.0, 2.0, 2.0]])  # sg(rho), each token its own
    close(gradient(no_ratio, log_probs), [[1.0, 1.0, 1.0]])
    close(no_ratio(log_probs), [[0.0, 0.0, 0.0]])
    close(sequence_token(log_probs, old, mask)[:, :2], [[LN2, LN2]])  # the value of `sequence`


@checked
@given(tables("new", "old"))
def test_sequence_ratios_equal_a_loop(table: dict) -> None:
    means, sums = [], []
    for mask, new, old in zip(table["mask"], table["new"], table["old"], strict=True):
        differences = [a - b for a, b, m in zip(new, old, mask, strict=True) if m]
        sums.append([sum(differences)])
        means.append([sum(differences) / len(differences) if differences else 0.0])
    arguments = (double(table["new"]), double(table["old"]), torch.tensor(table["mask"]))
    close(sequence(*arguments), means)
    close(sequence_sum(*arguments), sums)
    close(sequence_token(*arguments), [m * len(table["mask"][0]) for m in means])


# -- in a recipe ------------------------------------------------------------------------------------------------------


def test_gspo_weighs_sequences_alike_whatever_their_length() -> None:  # pains A10
    batch = make_batch(advantages=[1.0, -1.0], lengths=[2, 6])
    close(resolve("gspo", registry=REGISTRY).loss(batch).loss, 0.0)
    # gspo_token may be averaged over tokens, which is to weigh by length: -(2 * 1 - 6 * 1) / 8
    token_mean = resolve("gspo_token", {"loss_aggregator": "token_mean"}, REGISTRY)
    close(token_mean.loss(batch).loss, 0.5)


def test_gspo_clips_the_sequence_as_a_whole() -> None:
    # log-ratios +1e-3 and -1e-3 make rho 1, inside; +1e-3 twice makes 1.001, above 1 + 4e-4
    log_probs = double([[-1.0 + 1e-3, -1.0 - 1e-3], [-1.0 + 1e-3, -1.0 + 1e-3]]).requires_grad_()
    batch = make_batch(advantages=[1.0, 1.0], log_probs=log_probs, old_log_probs=double([[-1.0] * 2] * 2))
    result = resolve("gspo", registry=REGISTRY).loss(batch)
    result.loss.backward()
    close(result.loss, -(1.0 + 1.0004) / 2)
    close(log_probs.grad, [[-0.25, -0.25], [0.0, 0.0]])
    assert float(result.metrics["clip_ratio/high_mean"]) == 0.5


def test_gspo_token_takes_each_tokens_own_advantage() -> None:
    log_probs = double([[-1.0, -1.0]]).requires_grad_()
    batch = make_batch(advantages=[[3.0, -1.0]], log_probs=log_probs)
    resolve("gspo_token", registry=REGISTRY).loss(batch).loss.backward()
    close(log_probs.grad, [[-1.5, 0.5]])  # -A / |y|


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "cispo", "trl_rloo"])
def test_on_policy_the_ratio_is_exactly_one_in_any_precision(name: str, dtype: torch.dtype) -> None:  # pains F12, C12
    log_probs = -torch.rand(2, 3, generator=torch.Generator().manual_seed(0)).to(dtype) * 9
    batch = make_batch(advantages=[[2.0], [2.0]], log_probs=log_probs)
    recipe = resolve(name, {"kl": None, "clip_rule": {"name": "ppo_clip"}}, REGISTRY)
    result = recipe.loss(batch)
    assert result.loss == -2.0
    assert all(float(v) == 0 for k, v in result.metrics.items() if k.startswith("clip_ratio"))


def test_reinforce_reads_no_old_log_probs() -> None:
    recipe = resolve("reinforce", registry=REGISTRY)
    here = make_batch(advantages=[2.0], log_probs=[[-1.0, -3.0]])
    elsewhere = make_batch(advantages=[2.0], log_probs=[[-1.0, -3.0]], old_log_probs=[[-9.0, 9.0]])
    close(recipe.loss(here).loss, 8.0)  # -A (log pi_1 + log pi_2)
    close(recipe.loss(elsewhere).loss, 8.0)


def test_log_ratios_beyond_twenty_are_bounded_before_any_rule() -> None:
    seen = []

    @component
    def spy(log_ratio: Tensor, advantages: Tensor) -> object:
        seen.append(log_ratio.detach().clone())
        return ppo_clip(log_ratio, advantages)

    variant = Variant(name="x", extends="dr_grpo", clip_rule=spy)
    recipe = resolve(variant, registry=REGISTRY)
    recipe.loss(make_batch(advantages=[1.0], log_probs=[[-1.0, -1.0]], old_log_probs=[[-201.0, 199.0]]))
    close(seen[-1], [[20.0, -20.0]])
