"""Loss aggregators: hand-checked numbers, loops, and what cutting a step may not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.components.common import checked, close, double, tables
from trl_variants import Totals, VariantError, resolve
from trl_variants.components import aggregators
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch

REGISTRY = load_registry("none")
NAMES = list(REGISTRY.components("loss_aggregator"))
EXACT = [n for n in NAMES if not REGISTRY.component("loss_aggregator", n).info.batch_statistic]


def bare(name: str, losses: list, mask: list, **parameters: object) -> torch.Tensor:
    table = torch.tensor(mask)
    return getattr(aggregators, name)(double(losses), table, Totals.of(table), **parameters)


def recipe(name: str, **parameters: object) -> object:
    return resolve("grpo", {"kl": None, "loss_aggregator": {"name": name, **parameters}}, REGISTRY)


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [  # losses [2] and [1, 1, 1]
        ("seq_mean_token_mean", {}, 1.5),  # (2 + 1) / 2
        ("token_mean", {}, 1.25),  # 5 / 4
        ("token_mean_local", {}, 1.25),
        ("seq_mean_token_sum", {}, 2.5),  # (2 + 3) / 2
        ("seq_mean_token_sum_norm", {"constant": 8}, 0.3125),  # 5 / (2 * 8)
        ("seq_mean_token_sum_norm", {}, 5 / 6),  # the length limit, 3
    ],
)
def test_the_hand_checked_numbers(name: str, parameters: dict, expected: float) -> None:
    mask = [[1, 0, 0], [1, 1, 1]]
    close(bare(name, [[2.0, 9.0, 9.0], [1.0, 1.0, 1.0]], mask, **parameters), expected)
    # with advantages -2 and -1 and ratio 1 the token losses are those
    batch = make_batch(advantages=[-2.0, -1.0], mask=mask)
    close(recipe(name, **parameters).loss(batch).loss, expected)


def test_dr_grpos_constant_is_the_length_limit_not_the_width_of_the_batch() -> None:
    batch = make_batch(advantages=[-1.0, -1.0], lengths=[1, 3], max_length=8)
    close(resolve("dr_grpo", registry=REGISTRY).loss(batch).loss, 4 / (2 * 8))


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [  # losses 1 on lengths 4, 2 and 0
        ("seq_mean_token_mean", {}, 1.0),
        ("seq_mean_token_mean", {"count_empty": True}, 2 / 3),  # TRL, verl's trainer path
        ("seq_mean_token_sum", {}, 3.0),
        ("seq_mean_token_sum", {"count_empty": True}, 2.0),
        ("seq_mean_token_sum_norm", {}, 0.75),  # 6 / (2 * 4)
        ("seq_mean_token_sum_norm", {"count_empty": True}, 0.5),
        ("token_mean", {}, 1.0),
        ("token_mean_local", {}, 1.0),
    ],
)
def test_a_completion_without_tokens_counts_only_when_asked_to(name: str, parameters: dict, expected: float) -> None:
    mask = [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    close(bare(name, [[1.0] * 4] * 3, mask, **parameters), expected)


@pytest.mark.parametrize("name", NAMES)
def test_fully_masked_rows_leave_the_loss_of_the_others(name: str) -> None:  # pains A04
    advantages, lengths = [1.0, -2.0, 3.0, 0.5], [3, 1, 2, 3]
    mask = torch.arange(3)[None] < torch.tensor(lengths)[:, None]
    mask[2:] = False  # as truncated completions are masked
    whole = make_batch(advantages=advantages, mask=mask)
    rest = make_batch(advantages=advantages[:2], mask=mask[:2])
    close(recipe(name).loss(whole).loss, recipe(name).loss(rest).loss)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_any_token_is_zero_with_zero_gradient(name: str) -> None:
    log_probs = double([[-1.0, -1.0]]).requires_grad_()
    result = recipe(name).loss(make_batch(advantages=[1.0], log_probs=log_probs, mask=[[0, 0]]))
    result.loss.backward()
    close(result.loss, 0.0)
    close(log_probs.grad, [[0.0, 0.0]])


@checked
@given(tables("losses"), st.sampled_from(NAMES), st.booleans())
def test_aggregators_equal_a_loop(table: dict, name: str, count_empty: bool) -> None:
    rows = [
        [x for x, m in zip(losses, mask, strict=True) if m]
        for losses, mask in zip(table["losses"], table["mask"], strict=True)
    ]
    tokens = max(sum(len(row) for row in rows), 1)
    sequences = max(len(rows) if count_empty else sum(1 for row in rows if row), 1)
    expected = {
        "token_mean": sum(map(sum, rows)) / tokens,
        "token_mean_local": sum(map(sum, rows)) / tokens,
        "seq_mean_token_mean": sum(sum(row) / len(row) for row in rows if row) / sequences,
        "seq_mean_token_sum": sum(map(sum, rows)) / sequences,
        "seq_mean_token_sum_norm": sum(map(sum, rows)) / sequences / 7,
    }[name]
    parameters = {} if name.startswith("token_mean") else {"count_empty": count_empty}
    parameters |= {"constant": 7} if name == "seq_mean_token_sum_norm" else {}
    close(bare(name, table["losses"], table["mask"], **parameters), expected)


def gradient(name: str, cut: list[list[int]]) -> torch.Tensor:
    """The gradient of one step of four completions, cut into micro-batches that share its totals."""
    mask = torch.arange(12)[None] < torch.tensor([[2], [12], [5], [1]])  # pains A06: 2 against 12 tokens
    log_probs = -torch.ones(4, 12, dtype=torch.float64).requires_grad_()
    leaf = log_probs.detach().clone().requires_grad_()
    advantages = double([1.0, -1.0, 0.5, 2.0])
    totals = replace(Totals.of(mask), micro_batches=len(cut))
    for rows in cut:
        batch = make_batch(advantages=advantages[rows], log_probs=leaf[rows], mask=mask[rows], totals=totals)
        recipe(name).loss(batch).loss.backward()
    return leaf.grad


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("cut", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 1, 0], [2]]])
def test_the_gradient_is_the_same_however_the_step_is_cut(name: str, cut: list) -> None:  # pains A01, A06, A14
    close(gradient(name, cut), gradient(name, [[0, 1, 2, 3]]))


def test_the_mean_of_micro_batch_means_depends_on_the_cut_and_says_so() -> None:
    info = REGISTRY.component("loss_aggregator", "token_mean_local").info
    assert info.batch_statistic
    assert not torch.allclose(
        gradient("token_mean_local", [[0], [1], [2], [3]]), gradient("token_mean_local", [[0, 1, 2, 3]])
    )
    # completion 0 alone in its micro-batch: -A / 2 tokens / 4 micro-batches
    close(gradient("token_mean_local", [[0], [1], [2], [3]])[0, 0], -1 / 8)


def test_the_denominator_is_that_of_the_step_not_of_the_rollout() -> None:  # pains A02
    # two optimizer steps over one rollout: each divides by its own tokens
    for lengths in ([2, 2], [3, 5]):
        batch = make_batch(advantages=[-1.0, -1.0], lengths=lengths)
        close(recipe("token_mean").loss(batch).loss, 1.0)


def test_the_dapo_mean_is_over_the_whole_step_not_by_group() -> None:  # pains A13
    # groups of 2 and of 6 tokens with losses 1 and 0: 2/8 over the step; by group it would be (1 + 0) / 2
    batch = make_batch(advantages=[-1.0, -1.0, 0.0, 0.0], lengths=[1, 1, 3, 3])
    close(resolve("dapo", registry=REGISTRY).loss(batch).loss, 0.25)


@pytest.mark.parametrize("name", ["token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_mean_local"])
def test_one_loss_per_sequence_is_not_weighed_by_length_unawares(name: str) -> None:  # pains A10
    with pytest.raises(VariantError) as error:
        resolve("gspo", {"loss_aggregator": name}, REGISTRY)
    assert str(error.value) == (
        f"importance_ratio 'sequence' makes one loss per sequence, and loss_aggregator '{name}' would weigh it by the "
        "sequence's length. Use loss_aggregator: seq_mean_token_mean, or importance_ratio: sequence_token."
    )


def test_a_constant_of_nothing_is_refused() -> None:
    with pytest.raises(VariantError, match="^loss_aggregator 'seq_mean_token_sum_norm': constant must be above 0.$"):
        recipe("seq_mean_token_sum_norm", constant=0)
