"""Regularizers: the entropy bonus, its adaptive coefficient, and the critic's loss."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.components.common import checked, close, double, numbers
from trl_variants import Totals, Variant, VariantError, resolve, use
from trl_variants.components.regularizers import adaptive_entropy, entropy_bonus, value_clipped, value_loss
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch

REGISTRY = load_registry("none")


def test_the_entropy_bonus_is_minus_the_entropy() -> None:
    close(entropy_bonus(double([[0.5, 0.25]])), [[-0.5, -0.25]])


@pytest.mark.parametrize("aggregator", list(REGISTRY.components("loss_aggregator")))
def test_the_bonus_has_the_same_strength_under_every_aggregator(aggregator: str) -> None:  # pains A11
    entropies = double([[0.5, 0.1, 9.0], [0.2, 0.3, 0.4]]).requires_grad_()
    batch = make_batch(advantages=[0.0, 0.0], entropies=entropies, lengths=[1, 3])
    overrides = {"kl": None, "loss_aggregator": aggregator, "regularizer": {"name": "entropy_bonus", "coef": 0.02}}
    result = resolve("grpo", overrides, REGISTRY).loss(batch)
    result.loss.backward()
    close(result.loss, -0.02 * (0.5 + 0.2 + 0.3 + 0.4) / 4)
    close(entropies.grad, [[-0.005, 0.0, 0.0], [-0.005, -0.005, -0.005]])


def test_a_coefficient_of_null_or_true_is_refused_and_a_string_is_read() -> None:
    recipe = resolve("grpo", {"regularizer": {"name": "entropy_bonus", "coef": "1e-3"}}, REGISTRY)
    assert recipe.regularizers[0].parameters == {"coef": 0.001}
    for value in (None, True):
        with pytest.raises(VariantError) as error:
            resolve("grpo", {"regularizer": {"name": "entropy_bonus", "coef": value}}, REGISTRY)
        assert str(error.value) == f"regularizer 'entropy_bonus': coef must be a number, not {value}."


# -- adaptive entropy -------------------------------------------------------------------------------------------------

SETTINGS = {"target": 0.5, "delta": 0.1, "start": 0.05, "low": 0.0, "high": 0.2}


class Controller:
    """TRL 1.16's rules: measure the whole window at its end, move, and apply only where it was at or below target."""

    def __init__(self) -> None:
        self.coef, self.last = SETTINGS["start"], math.inf

    def applied(self) -> float:
        return self.coef if self.last <= SETTINGS["target"] else 0.0

    def end(self, entropies: list[float]) -> None:
        self.last = sum(entropies) / max(len(entropies), 1)
        up = self.last <= SETTINGS["target"]
        move = SETTINGS["delta"] if up else -SETTINGS["delta"]
        self.coef = min(max(self.coef + move, SETTINGS["low"]), SETTINGS["high"])


@checked
@given(
    st.lists(  # optimizer steps, each of micro-batches, each of two ranks' tokens
        st.lists(st.tuples(*[st.lists(numbers.map(abs), min_size=1, max_size=3)] * 2), min_size=1, max_size=3),
        min_size=1,
        max_size=5,
    )
)
def test_adaptive_entropy_equals_a_loop_over_steps_micro_batches_and_ranks(steps: list) -> None:
    controller, states = Controller(), [{}, {}]
    for number, micro_batches in enumerate(steps):
        for tokens in micro_batches:
            sums = double([[sum(rank), len(rank)] for rank in tokens])
            for rank, entropies in enumerate(tokens):
                table = double([entropies])
                term, states[rank] = adaptive_entropy(
                    table, torch.ones_like(table), lambda own, all=sums: all, number, states[rank], **SETTINGS
                )
                close(term, -controller.applied() * table)
        controller.end([h for tokens in micro_batches for rank in tokens for h in rank])
    assert states[0] == states[1]


def test_adaptive_entropy_by_hand() -> None:
    # measured .1 at or below target .2: alpha .1 + .005, and the bonus applies; measured 1.0: alpha .1, no bonus
    low = {"step": 0, "sum": 0.4, "tokens": 4.0}
    term, state = adaptive_entropy(double([[0.5]]), torch.ones(1, 1), lambda x: x, 1, low, start=0.1)
    close(term, [[-0.0525]])
    assert state["coef"] == pytest.approx(0.105)
    high = {**state, "step": 1, "sum": 4.0, "tokens": 4.0}
    term, state = adaptive_entropy(double([[0.5]]), torch.ones(1, 1), lambda x: x, 2, high)
    close(term, [[0.0]])
    assert state["coef"] == pytest.approx(0.1)


def test_an_entropy_exactly_at_the_target_raises_the_coefficient_and_gets_the_bonus() -> None:
    at_target = {"step": 0, "sum": 1.0, "tokens": 2.0}
    term, state = adaptive_entropy(double([[0.5]]), torch.ones(1, 1), lambda x: x, 1, at_target, **SETTINGS)
    assert state["coef"] == pytest.approx(0.15)
    close(term, [[-0.075]])


def test_masked_entropies_are_not_measured() -> None:
    entropies = double([[0.5, math.nan, 9.0]])
    _, state = adaptive_entropy(entropies, torch.tensor([[1, 0, 0]]), lambda x: x, 0, {})
    assert (state["sum"], state["tokens"]) == (0.5, 1.0)


def test_adaptive_entropy_through_a_recipe_threads_its_state_and_leaves_the_old_one() -> None:
    recipe = resolve("dr_grpo", {"regularizer": {"name": "adaptive_entropy", **SETTINGS}}, REGISTRY)
    controller, states = Controller(), {}
    for step, rows in enumerate([[[0.1, 0.2], [0.3]], [[0.9], [0.8, 0.9]], [[0.2], [0.2]], [[0.4], [0.4]]]):
        tokens = [h for row in rows for h in row]
        for row in rows:  # two micro-batches a step
            entropies = double([row]).requires_grad_()
            totals = replace(Totals.of(torch.ones(1, len(tokens))), max_length=4)
            batch = make_batch(advantages=[0.0], entropies=entropies, totals=totals, step=step)
            before = copy.deepcopy(states)
            result = recipe.loss(batch, states=states)
            assert states == before
            result.loss.backward()
            close(entropies.grad, [[-controller.applied() / len(tokens)] * len(row)])
            states = result.states
        controller.end(tokens)


def test_coefficients_out_of_range_are_refused() -> None:
    for parameters in ({"delta": 0}, {"start": 2.0}, {"low": 0.1}):
        with pytest.raises(VariantError) as error:
            resolve("grpo", {"regularizer": {"name": "adaptive_entropy", **parameters}}, REGISTRY)
        assert str(error.value) == (
            "regularizer 'adaptive_entropy': delta must be above 0, and low <= start <= high must hold."
        )


# -- the critic -------------------------------------------------------------------------------------------------------


def test_the_value_loss_is_the_worse_of_clipped_and_unclipped() -> None:  # pains E14
    # V_old 0, V 1, R 2, c .2: 1/2 max((1 - 2)^2, (.2 - 2)^2) = 1.62
    v, old, target = double([[1.0]]), double([[0.0]]), double([[2.0]])
    close(value_loss(v, old, target), [[1.62]])
    close(value_loss(v, old, target, clip=None), [[0.5]])
    values = v.clone().requires_grad_()
    batch = make_batch(advantages=[0.0], values=values, old_values=old, returns=target)
    ppo = Variant(
        name="ppo_like",
        extends="grpo",
        advantage_estimator="gae",
        advantage_normalizer="batch_std",
        regularizer=use("value_loss", coef=0.1),
        kl=None,
        critic="separate",
    )
    result = resolve(ppo, registry=REGISTRY).loss(batch)
    result.loss.backward()
    close(result.loss, 0.162)
    close(values.grad, [[0.0]])  # the clipped square is the larger one, and does not move with V
    assert float(result.metrics["value_loss"]) == pytest.approx(1.62)


@checked
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6), st.sampled_from([None, 0.25, 1.5]))
def test_the_value_loss_equals_a_loop(rows: list[tuple], clip: float | None) -> None:
    expected = []
    for v, old, target in rows:
        near = v if clip is None else min(max(v, old - clip), old + clip)
        expected.append(max((v - target) ** 2, (near - target) ** 2) / 2)
    v, old, target = (double([list(column)]) for column in zip(*rows, strict=True))
    close(value_loss(v, old, target, clip=clip), [expected])


def test_the_critic_learns_the_same_however_the_step_is_cut() -> None:  # pains A08
    ppo = Variant(
        name="x", extends="grpo", advantage_estimator="gae", regularizer="value_loss", kl=None, critic="separate"
    )
    recipe = resolve(ppo, registry=REGISTRY)
    mask = torch.arange(4)[None] < torch.tensor([[1], [4], [2], [3]])
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradient(*cut: list[int]) -> torch.Tensor:
        values = table.clone().requires_grad_()
        for rows in cut:
            batch = make_batch(
                advantages=[0.0] * len(rows),
                values=values[rows],
                old_values=table[rows] - 0.1,
                returns=table[rows] + 0.5,
                mask=mask[rows],
                totals=replace(Totals.of(mask), micro_batches=len(cut)),
            )
            recipe.loss(batch).loss.backward()
        return values.grad

    whole = gradient([0, 1, 2, 3])
    close(whole[mask], double([-0.5 / 10] * 10))  # (V - R) / tokens
    for cut in ([[0], [1], [2], [3]], [[0, 1], [2, 3]]):
        close(gradient(*cut), whole)


def test_a_completion_without_a_reward_has_no_value_loss() -> None:
    v, old, target = double([[1.0], [1.0]]), double([[0.0], [0.0]]), double([[2.0], [2.0]])
    close(value_loss(v, old, target, torch.tensor([True, False])), [[1.62], [0.0]])
    critic = {"values": v.clone().requires_grad_(), "old_values": v, "returns": target}
    ppo = Variant(
        name="x", extends="grpo", advantage_estimator="gae", regularizer="value_loss", kl=None, critic="separate"
    )
    batch = make_batch(advantages=[0.0, 0.0], scored=torch.tensor([True, False]), **critic)
    resolve(ppo, registry=REGISTRY).loss(batch).loss.backward()
    close(critic["values"].grad, [[-0.5], [0.0]])  # (V - R) / 2 tokens of the step


@checked
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6), st.sampled_from([None, 0.25, 1.5]))
def test_the_value_clip_counts_where_the_gradient_is_gone(rows: list[tuple], clip: float | None) -> None:
    v, old, target = (double([list(column)]) for column in zip(*rows, strict=True))
    v.requires_grad_()
    clipped = value_clipped(v.detach(), old, target, clip=clip)
    value_loss(v, old, target, clip=clip).sum().backward()
    assert not v.grad[clipped].any()
    moving = ~clipped & (v.detach() != target)
    if clip is not None:  # at the edges of the clip both squares are the same, and the gradient is shared
        moving &= ((v.detach() - old).abs() - clip).abs() > 1e-9
    assert v.grad[moving].all()


def test_a_value_clip_of_nothing_is_refused() -> None:
    ppo = Variant(name="x", extends="grpo", advantage_estimator="gae", critic="separate", kl=None)
    with pytest.raises(VariantError, match="clip must be above 0, or null for no clipping.$"):
        resolve(ppo, {"regularizer": {"name": "value_loss", "clip": 0}}, REGISTRY)
