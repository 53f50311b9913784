"""What a recipe refuses while it runs: numbers that are not finite, wrong shapes and types, missing inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trl_variants import KL, Advantages, ClipResult, Variant, VariantError, component, resolve
from trl_variants.recipe import Recipe
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch, make_rollout

REGISTRY = load_registry("none")


def of(variant: str | Variant, **overrides: Any) -> Recipe:
    return resolve(variant, overrides, REGISTRY)


def message(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(VariantError) as error:
        call(*arguments, **named)
    return str(error.value)


# -- what is not finite -----------------------------------------------------------------------------------------------

NOT_FINITE = "holds a value that is not finite at a position that counts."


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["log_probs", "old_log_probs", "ref_log_probs", "entropies"])
def test_a_number_that_is_not_finite_where_a_token_counts_names_the_input(name: str, bad: float) -> None:
    good = {n: [[-1.0, -1.0]] for n in ("log_probs", "old_log_probs", "ref_log_probs", "entropies")}
    recipe = of("grpo")
    for advantage in (1.0, 0.0):  # also where the loss would stay finite
        batch = make_batch(advantages=[advantage], **{**good, name: [[-1.0, bad]]})
        assert message(recipe.loss, batch) == f"{name} {NOT_FINITE}"
    masked = make_batch(advantages=[1.0], **{**good, name: [[-1.0, bad]]}, mask=[[1, 0]])
    assert recipe.loss(masked).loss.isfinite()


def test_a_rollout_that_is_not_finite_names_the_input_too() -> None:
    rollout = make_rollout([1.0, 0.0], log_probs=[[-1.0], [math.nan]], ref_log_probs=[[-1.0], [-1.0]])
    assert message(of("rloo").advantages, rollout) == f"log_probs {NOT_FINITE}"


@component
def infinite_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs) / (log_probs + 7).abs()


def test_a_ratio_that_is_not_finite_is_named_though_the_bound_would_hide_it() -> None:
    recipe = of("dr_grpo", importance_ratio=infinite_ratio)
    batch = make_batch(advantages=[1.0], log_probs=[[-7.0]], old_log_probs=[[-8.0]])
    assert message(recipe.loss, batch) == (
        f"importance_ratio 'infinite_ratio' ({__name__}) made a value that is not finite at a position that counts."
    )
    # 0 / 0 at a masked position, where log pi is 0, is nobody's business
    masked = make_batch(advantages=[1.0], log_probs=[[-7.0, -1.0]], old_log_probs=[[-8.0, -1.0]], mask=[[0, 1]])
    assert of("dr_grpo", importance_ratio=undefined_where_masked).loss(masked).loss.isfinite()


@component
def undefined_where_masked(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs) / log_probs.abs()


@component
def fails_at_seven(rewards: Tensor) -> Tensor:
    return rewards / (rewards - 7)


@component
def normalizes_badly_at_seven(advantages: Tensor) -> Tensor:
    return (advantages - 7) / (advantages - 7)


@component
def rule_fails_at_seven(log_ratio: Tensor, advantages: Tensor) -> ClipResult:
    return ClipResult(loss=log_ratio.exp() * advantages / (advantages - 7))


@component
def weight_fails_at_seven(log_probs: Tensor, advantages: Tensor) -> Tensor:
    return 1 / (advantages - 7)


@component
def term_fails_at_seven(log_probs: Tensor, advantages: Tensor) -> Tensor:
    return log_probs / (advantages - 7)


@component
def aggregator_fails_at_seven(per_token_loss: Tensor) -> Tensor:
    return per_token_loss.sum() / (per_token_loss.detach().sum() + 7)


@pytest.mark.parametrize(
    ("slot", "bad"),
    [
        ("advantage_estimator", fails_at_seven),
        ("reward_shaper", fails_at_seven),
        ("advantage_normalizer", normalizes_badly_at_seven),
        ("clip_rule", rule_fails_at_seven),
        ("token_weight", weight_fails_at_seven),
        ("regularizer", term_fails_at_seven),
        ("loss_aggregator", aggregator_fails_at_seven),
    ],
)
def test_a_component_that_makes_such_a_number_is_named_with_its_owner(slot: str, bad: Any) -> None:
    overrides = {"advantage_estimator": "returns", "advantage_normalizer": None, slot: bad}
    recipe = of("dr_grpo", **overrides)
    if slot in ("advantage_estimator", "reward_shaper", "advantage_normalizer"):
        text = message(recipe.advantages, make_rollout([7.0, 1.0]))
    else:
        text = message(recipe.loss, make_batch(advantages=[7.0]))
    name = bad.__name__
    assert text == f"{slot} '{name}' ({__name__}) made a value that is not finite at a position that counts."


# -- wrong shapes and types, found before training --------------------------------------------------------------------


@component
def rows_missing(rewards: Tensor) -> Tensor:
    return rewards[1:]


@component
def a_list(rewards: Tensor) -> Any:
    return rewards.tolist()


@component
def nothing(rewards: Tensor) -> Any:
    return None


@component
def short_returns(rewards: Tensor) -> Advantages:
    return Advantages(rewards, returns=torch.zeros(3))


@component
def bare_loss(log_ratio: Tensor, advantages: Tensor) -> Any:
    return -log_ratio.exp() * advantages


@component
def wrong_flags(log_ratio: Tensor, advantages: Tensor) -> ClipResult:
    return ClipResult(loss=-log_ratio.exp() * advantages, low=torch.zeros(7))


@component
def not_a_scalar(per_token_loss: Tensor) -> Tensor:
    return per_token_loss.sum(1)


@component
def a_tensor_coefficient(kl_coef: float) -> Any:
    return torch.tensor(kl_coef)


@component
def raises(rewards: Tensor) -> Tensor:
    raise KeyError("gone")


HERE = __name__


@pytest.mark.parametrize(
    ("slot", "wrong", "expected"),
    [  # the rehearsal has two prompts of two completions, and a batch of two rows, of three tokens each
        (
            "advantage_estimator",
            rows_missing,
            "advantage_estimator 'rows_missing' ({}) returned a tensor of shape (3,); expected (4,) or (4, 3).",
        ),
        ("advantage_estimator", a_list, "advantage_estimator 'a_list' ({}) returned list; it must return a tensor."),
        (  # pains G06
            "advantage_estimator",
            nothing,
            "advantage_estimator 'nothing' ({}) returned NoneType; it must return a tensor.",
        ),
        (
            "advantage_estimator",
            short_returns,
            "advantage_estimator 'short_returns' ({}) returned returns of shape (3,); expected (N, T).",
        ),
        ("reward_shaper", nothing, "reward_shaper 'nothing' ({}) returned NoneType; it must return a tensor."),
        (
            "sample_filter",
            rows_missing,
            "sample_filter 'rows_missing' ({}) returned a tensor of shape (3,); expected (4,).",
        ),
        ("clip_rule", bare_loss, "clip_rule 'bare_loss' ({}) returned Tensor; it must return a ClipResult."),
        (
            "clip_rule",
            wrong_flags,
            "clip_rule 'wrong_flags' ({}): low returned a tensor of shape (7,); expected (2, 3) or (2, 1).",
        ),
        (
            "loss_aggregator",
            not_a_scalar,
            "loss_aggregator 'not_a_scalar' ({}) returned a tensor of shape (2,); expected ().",
        ),
        (
            "kl",
            {"estimator": "k1", "placement": "sequence_reward", "coef": 0.1, "controller": a_tensor_coefficient},
            "kl_controller 'a_tensor_coefficient' ({}) returned Tensor; it must return a number.",
        ),
        ("advantage_estimator", raises, "advantage_estimator 'raises' ({}) failed: 'gone'"),
    ],
)
def test_a_component_of_the_wrong_shape_or_type_does_not_resolve(slot: str, wrong: Any, expected: str) -> None:
    overrides = {"advantage_normalizer": None, "kl": None, slot: wrong}
    with pytest.raises(VariantError) as error:
        of("grpo", **overrides)
    assert str(error.value) == expected.format(HERE)
    if wrong is raises:
        assert isinstance(error.value.__cause__, KeyError)


def test_an_input_that_is_not_there_is_named() -> None:
    recipe = of("dr_grpo", regularizer="entropy_bonus")
    assert message(recipe.loss, make_batch(advantages=[1.0])) == (
        "regularizer 'entropy_bonus' needs entropies, and there is none here."
    )
    assert message(of("rloo").advantages, make_rollout([1.0, 0.0])) == (
        "kl_estimator 'k1' needs log_probs, and there is none here."
    )
    assert message(of("grpo").loss, make_batch(advantages=[1.0])) == (
        "kl_estimator 'k3' needs ref_log_probs, and there is none here."
    )


@component
def first_only(rewards_per_func: Tensor) -> Tensor:
    return rewards_per_func[:, 0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"reward_shaper": "soft_overlong"}, "reward_shaper 'soft_overlong'"),
        ({"kl": KL("k1", placement="sequence_reward", coef=0.1)}, "kl_placement 'sequence_reward'"),
    ],
)
def test_a_change_to_the_reward_that_the_estimator_would_not_see_is_refused(change: Any, name: str) -> None:
    assert of("dr_grpo", **change).advantage_estimator.name == "group_mean"
    assert of("dr_grpo", advantage_estimator=first_only, kl=KL("k3", placement="loss", coef=0.1)).kl
    assert message(of, "dr_grpo", advantage_estimator=first_only, **change) == (
        f"{name} has no effect: advantage_estimator 'first_only' reads neither rewards nor token_rewards. Switch it "
        "off, or use another advantage_estimator."
    )


def test_what_a_recipe_needs_is_known_beforehand() -> None:
    assert of("grpo").needs_reference
    assert not of("grpo").needs_rollout_log_probs
    assert of("rloo").needs_rollout_log_probs
    assert not of("dapo").needs_reference
    assert not of("dapo").needs("entropies")
    assert of("dapo", regularizer="entropy_bonus").needs("entropies")
    assert not of("dapo").needs("sampling_log_probs")  # used where there, and not asked for
    off = {"sample_filter": None, "sampling": "mask", "advantage_normalizer": None}
    assert of("dapo", advantage_estimator="returns", **off).min_generations == 1


def test_a_state_that_a_checkpoint_could_not_hold_is_refused_at_once() -> None:
    class Meter:
        pass

    @component
    def metered(rewards: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        return rewards, {"means": [1.0, {"meter": Meter()}]}

    with pytest.raises(
        VariantError, match=r"advantage_estimator 'metered' .* keeps a Meter in its state; a state holds"
    ):
        resolve("grpo", {"advantage_estimator": metered, "advantage_normalizer": None})


@component
def keeps_the_graph(entropies: Tensor, state: dict) -> tuple[Tensor, dict]:
    return entropies, {"entropy": entropies.sum()}


@component
def scores_for_flags(log_ratio: Tensor, advantages: Tensor) -> ClipResult:
    return ClipResult(loss=-log_ratio.exp() * advantages, high=log_ratio)


def test_a_state_that_holds_on_to_the_graph_is_refused() -> None:
    entropies = torch.full((1, 1), 0.5, requires_grad=True)
    batch = make_batch(advantages=[1.0], log_probs=[[-1.0]], entropies=entropies)
    recipe = of("dr_grpo", regularizer=keeps_the_graph)  # which shows with a gradient only
    said = "keeps a tensor with its gradient in its state; keep it detached."
    assert message(recipe.loss, batch).endswith(said)


def test_clip_flags_are_bool() -> None:
    said = message(of, "grpo", clip_rule=scores_for_flags)
    assert said.endswith("high is of torch.float32; it says which tokens, so torch.bool.")


@component
def lower_in_the_group(rewards: Tensor) -> Tensor:
    return (rewards[:, None] > rewards).sum(1)


def test_whole_numbers_become_advantages() -> None:
    recipe = of("dr_grpo", advantage_estimator=lower_in_the_group)
    advantages = recipe.advantages(make_rollout([0.5, 0.1, 0.9])).advantages
    assert advantages.tolist() == [1.0, 0.0, 2.0] and advantages.dtype is torch.float64
