"""The recipe: in what order things happen, and what each part sees. What it refuses is in test_recipe_errors.py."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.components.common import close, double
from trl_variants import KL, ClipResult, Variant, VariantError, component, resolve, use
from trl_variants.components.aggregators import token_mean
from trl_variants.recipe import Recipe
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch, make_rollout

REGISTRY = load_registry("none")


def of(variant: str | Variant, **overrides: Any) -> Recipe:
    return resolve(variant, overrides, REGISTRY)


def around(**slots: Any) -> Recipe:
    """A recipe of nothing but these components on top of REINFORCE."""
    return resolve(Variant(name="x", extends="reinforce", **slots), registry=REGISTRY)


# -- order ------------------------------------------------------------------------------------------------------------

CALLS: list[tuple[str, Any]] = []


def noting(name: str, value: Any) -> None:
    CALLS.append((name, value.tolist() if isinstance(value, Tensor) else value))


@component
def a_filter(rewards: Tensor) -> Tensor:
    noting("filter", rewards)
    return torch.ones_like(rewards, dtype=torch.bool)


@component
def a_shaper(rewards: Tensor) -> Tensor:
    noting("shaper", rewards)
    return rewards + 10


@component(after_kl=True)
def a_late_shaper(rewards: Tensor) -> Tensor:
    noting("late shaper", rewards)
    return rewards + 100


@component
def an_estimator(rewards: Tensor) -> Tensor:
    noting("estimator", rewards)
    return rewards


@component
def a_normalizer(advantages: Tensor) -> Tensor:
    noting("normalizer", advantages)
    return advantages / 2


@component
def a_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    noting("ratio", None)
    return log_probs - old_log_probs


@component
def a_weight(log_probs: Tensor) -> Tensor:
    noting("weight", None)
    return torch.full_like(log_probs, 3.0)


@component
def a_rule(log_ratio: Tensor, advantages: Tensor) -> ClipResult:
    noting("rule", log_ratio.detach())
    return ClipResult(loss=-log_ratio.exp() * advantages)


@component
def an_aggregator(per_token_loss: Tensor, mask: Tensor, totals: Any) -> Tensor:
    noting("aggregator", per_token_loss.detach())
    return token_mean(per_token_loss, mask, totals)


@component
def a_term(entropies: Tensor) -> Tensor:
    noting("term", None)
    return entropies


def test_a_rollout_runs_filters_shapers_kl_late_shapers_estimator_normalizers() -> None:
    CALLS.clear()
    recipe = around(
        reward_shaper=[a_late_shaper, a_shaper],  # the late one waits for KL wherever it stands
        sample_filter=a_filter,
        kl=KL("k1", placement="sequence_reward", coef=1.0),
        advantage_estimator=an_estimator,
        advantage_normalizer=a_normalizer,
    )
    CALLS.clear()
    result = recipe.advantages(make_rollout([1.0], log_probs=[[0.5]], ref_log_probs=[[0.0]]))
    assert CALLS == [
        ("filter", [1.0]),  # the raw reward
        ("shaper", [1.0]),
        ("late shaper", [10.5]),  # 1 + 10 - 1 * k1
        ("estimator", [110.5]),
        ("normalizer", [110.5]),
    ]
    close(result.advantages, [55.25])
    close(result.rewards, [110.5])


def test_a_batch_runs_ratio_weights_rule_kl_aggregator_terms() -> None:
    recipe = of(
        "grpo",
        importance_ratio=a_ratio,
        token_weight=a_weight,
        clip_rule=a_rule,
        kl={"estimator": "k2", "coef": 2.0},
        loss_aggregator=an_aggregator,
        regularizer=use(a_term, coef=0.5),
    )
    CALLS.clear()
    batch = make_batch(advantages=[1.0], log_probs=[[-1.0]], ref_log_probs=[[-2.0]], entropies=[[0.25]])
    result = recipe.loss(batch)
    assert CALLS == [
        ("ratio", None),
        ("weight", None),
        ("rule", [[0.0]]),
        ("aggregator", [[-3.0 + 2.0 * 0.5]]),  # the weight scales the policy loss, and KL comes after it
        ("term", None),
    ]
    close(result.loss, -3.0 + 1.0 + 0.5 * 0.25)


def test_terms_are_aggregated_on_their_own_with_their_own_coefficients() -> None:
    @component
    def ones(mask: Tensor) -> Tensor:
        return torch.ones(mask.shape, dtype=torch.float64)

    recipe = of("dr_grpo", regularizer=[use("entropy_bonus", coef=0.1), use(ones, coef=2.0)])
    batch = make_batch(advantages=[0.0, 0.0], entropies=[[0.5, 9.0], [0.3, 0.1]], lengths=[1, 2])
    close(recipe.loss(batch).loss, -0.1 * (0.5 + 0.3 + 0.1) / 3 + 2.0)


def test_a_rule_that_names_token_weights_is_not_weighted_twice() -> None:
    @component
    def own_weights(log_ratio: Tensor, advantages: Tensor, token_weights: Tensor) -> ClipResult:
        return ClipResult(loss=-log_ratio.exp() * advantages * token_weights**2)

    batch = make_batch(advantages=[1.0], log_probs=[[-1.0]])
    close(of("dr_grpo", token_weight=a_weight).loss(batch).loss, -3.0)
    close(of("dr_grpo", token_weight=a_weight, clip_rule=own_weights).loss(batch).loss, -9.0)
    close(of("dr_grpo", token_weight=None, clip_rule=own_weights).loss(batch).loss, -1.0)


# -- rewards ----------------------------------------------------------------------------------------------------------


@component
def per_token(mask: Tensor) -> Tensor:
    """1 for every token, in place of the reward's own: a term, since it names no rewards."""
    return mask.double()


@component
def twice(token_rewards: Tensor) -> Tensor:
    return 2 * token_rewards


@pytest.mark.parametrize(
    ("shapers", "scalar", "tokens"),
    [
        ([], [4.0], [[0.0, 0.0, 4.0]]),
        ([per_token], [4.0 + 2], [[1.0, 0.0, 5.0]]),  # added, per token
        ([twice], [8.0], [[0.0, 0.0, 8.0]]),
        ([per_token, twice], [12.0], [[2.0, 0.0, 10.0]]),
        ([per_token, a_shaper], [16.0], [[0.0, 0.0, 16.0]]),  # one that names rewards sees and returns the sum
        ([a_shaper, per_token], [16.0], [[1.0, 0.0, 15.0]]),
    ],
)
def test_rewards_are_seen_whole_in_whichever_form_a_component_names(shapers: list, scalar: list, tokens: list) -> None:
    rollout = make_rollout([4.0], mask=[[1, 0, 1]])  # pains B25
    close(around(reward_shaper=shapers).advantages(rollout).advantages, scalar)
    close(around(reward_shaper=shapers, advantage_estimator=reads_tokens).advantages(rollout).advantages, tokens)


@component
def reads_tokens(token_rewards: Tensor) -> Tensor:
    return token_rewards


@pytest.mark.parametrize(
    ("placement", "estimator", "expected"),
    [  # score 2 on the last of two tokens, k1 = .5 and 1, beta .1
        ("token_reward", reads_tokens, [[-0.05, 1.9]]),
        ("sequence_reward", reads_tokens, [[0.0, 1.85]]),
        ("token_reward", an_estimator, [1.85]),
        ("sequence_reward", an_estimator, [1.85]),
    ],
)
def test_kl_in_the_reward_reaches_every_estimator(placement: str, estimator: Any, expected: list) -> None:
    recipe = around(kl=KL("k1", placement=placement, coef=0.1), advantage_estimator=estimator)
    rollout = make_rollout([2.0], lengths=[2], log_probs=[[0.5, 1.0]], ref_log_probs=[[0.0, 0.0]])
    close(recipe.advantages(rollout).advantages, expected)


def test_a_coefficient_that_is_given_stands_in_for_the_variants_own() -> None:
    recipe = of("rloo")
    rollout = make_rollout([1.0, 1.0], lengths=[1, 1], log_probs=[[1.0], [0.0]], ref_log_probs=[[0.0], [0.0]])
    close(recipe.advantages(rollout).rewards, [0.95, 1.0])
    close(recipe.advantages(rollout, kl_coef=0.5).rewards, [0.5, 1.0])
    batch = make_batch(advantages=[0.0], log_probs=[[1.0]], ref_log_probs=[[0.0]])
    k3 = math.exp(-1)
    close(of("grpo").loss(batch).loss, 0.04 * k3)
    close(of("grpo").loss(batch, kl_coef=0.5).loss, 0.5 * k3)


@component
def one_more(advantages: Tensor) -> Tensor:
    return advantages + 1


def test_unscored_rows_get_zero_whatever_an_estimator_or_a_normalizer_says() -> None:
    rollout = make_rollout(
        [1.0, math.nan],
        scored=[True, False],
        lengths=[1, 1],
        log_probs=[[0.5], [7.0]],
        ref_log_probs=[[0.0], [0.0]],
    )
    kl = KL("k1", placement="sequence_reward", coef=1.0)
    for estimator, normalizer, expected in (
        (an_estimator, None, [0.5, 0.0]),
        ("returns", one_more, [1.5, 0.0]),
        (reads_tokens, None, [[0.5], [0.0]]),
    ):
        recipe = around(kl=kl, advantage_estimator=estimator, advantage_normalizer=normalizer)
        result = recipe.advantages(rollout)
        close(result.advantages, expected)
        assert float(result.metrics["reward_shaped"]) == 0.5


def test_returns_are_taken_before_any_normalizer() -> None:
    variant = Variant(
        name="x", extends="reinforce", advantage_estimator="gae", advantage_normalizer="batch_std", critic="separate"
    )
    result = resolve(variant, registry=REGISTRY).advantages(make_rollout([1.0], values=[[0.1, 0.2]], lengths=[2]))
    close(result.returns, [[0.1 + 0.1 + 0.95 * 0.8, 1.0]])  # A + V: delta .1, .8


def test_advantages_carry_no_gradient() -> None:
    values = double([[0.1, 0.2]]).requires_grad_()
    variant = Variant(name="x", extends="reinforce", advantage_estimator="gae", critic="separate")
    result = resolve(variant, registry=REGISTRY).advantages(make_rollout([1.0], values=values, lengths=[2]))
    assert not result.advantages.requires_grad
    assert not result.returns.requires_grad


# -- states -----------------------------------------------------------------------------------------------------------


@component
def moving_baseline(rewards: Tensor, state: dict, *, decay: float = 0.5) -> tuple[Tensor, dict]:
    """Rewards minus a running mean of them."""
    mean = state.get("mean", 0.0)
    return rewards - mean, {"mean": decay * mean + (1 - decay) * float(rewards.mean())}


def test_states_are_threaded_by_slot_and_name_and_never_changed_in_place() -> None:
    recipe = around(advantage_estimator=moving_baseline)
    states: dict = {}
    for reward, expected in ((4.0, 4.0), (4.0, 2.0), (4.0, 1.0)):  # means 0, 2, 3
        before = copy.deepcopy(states)
        result = recipe.advantages(make_rollout([reward]), states=states)
        close(result.advantages, [expected])
        assert states == before
        states = result.states
    assert states == {"advantage_estimator.moving_baseline": {"mean": 3.5}}
    # evaluation: the same states again, and the caller's are as they were
    again = recipe.advantages(make_rollout([0.0]), states=states)
    assert states == {"advantage_estimator.moving_baseline": {"mean": 3.5}}
    assert again.states == {"advantage_estimator.moving_baseline": {"mean": 1.75}}


def test_a_stateful_component_must_return_its_new_state() -> None:
    @component
    def forgets(rewards: Tensor, state: dict) -> Tensor:
        return rewards

    with pytest.raises(VariantError) as error:
        around(advantage_estimator=forgets)
    assert str(error.value) == ("advantage_estimator 'forgets' names state, so it must return (output, new_state).")


# -- what the filters keep --------------------------------------------------------------------------------------------


@component
def every_second_time(rewards: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    calls = state.get("calls", 0)
    return torch.full_like(rewards, calls % 2 == 1, dtype=torch.bool), {"calls": calls + 1}


def test_keep_is_what_the_filters_say_of_the_raw_rewards() -> None:
    # Groups (0.5, 0.5) and (0, 1); the penalty of the shaper makes the first differ, too late. The last is cut.
    rollout = make_rollout(
        [0.5, 0.5, 0.0, 1.0], group_size=2, lengths=[1, 9, 5, 10], max_length=10, truncated=[False, False, False, True]
    )
    recipe = of("dapo", sample_filter=["zero_variance", "truncated"])
    assert recipe.keep(rollout).tolist() == recipe.advantages(rollout).keep.tolist() == [False, False, True, False]
    assert of("grpo").keep(rollout).all()  # without a filter


def test_keep_changes_no_state_and_what_was_kept_before_stays_kept() -> None:
    recipe = around(sample_filter=every_second_time)
    key, rollout = "sample_filter.every_second_time", make_rollout([1.0, 2.0, 3.0])
    states = {key: {"calls": 1}}
    assert recipe.keep(rollout, states=states).all() and states == {key: {"calls": 1}}
    assert not recipe.keep(rollout).any()
    given = torch.tensor([True, False, True])
    result = recipe.advantages(rollout, keep=given)
    assert result.keep.tolist() == given.tolist()  # the filter, asked here, drops all
    assert result.states == {key: {"calls": 1}}  # and its state moves on
