"""Components of the rollout phase that break the contract: the slot, the component, the property, what is said."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from trl_variants import component


@component
def first_row_is_special(rewards: Tensor) -> Tensor:
    return rewards - rewards[0]


@component(group_centred=True)
def sum_of_the_group(rewards: Tensor, scored: Tensor) -> Tensor:
    return rewards * scored


@component
def mean_with_the_unscored(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean()


@component
def in_place(advantages: Tensor) -> Tensor:
    return advantages.mul_(2)


@component
def counts_in_its_state(kl_coef: float, state: dict) -> tuple[float, dict]:
    state["calls"] = state.get("calls", 0) + 1
    return kl_coef, state


@component
def baseline_of_all(rewards: Tensor, scored: Tensor, state: dict) -> tuple[Tensor, dict]:
    return torch.where(scored, rewards, 0.0) - state.get("mean", 0.0) * scored, {"mean": float(rewards.mean())}


LAST: list[float] = []


@component
def remembers_elsewhere(rewards: Tensor) -> Tensor:
    before = sum(LAST)
    LAST[:] = rewards.tolist()
    return rewards - before


@component
def by_the_label(rewards: Tensor, scored: Tensor, group_ids: Tensor) -> Tensor:
    return rewards * scored * (1 + group_ids)


@component
def std_of_the_dropped(advantages: Tensor, scored: Tensor) -> Tensor:
    each = advantages if advantages.dim() == 1 else advantages.sum(1)
    return advantages / (each[scored].std(unbiased=False) + 1e-8 if scored.any() else 1.0)


@component
def first_of_the_state(rewards: Tensor, scored: Tensor, state: dict) -> tuple[Tensor, dict]:
    return rewards * scored, {"seen": {"first": rewards[:1].clone()}}


@component
def buffer_with_the_unscored(rewards: Tensor, scored: Tensor, state: dict) -> tuple[Tensor, dict]:
    return rewards * scored, {"rewards": rewards.tolist()}


@component
def two_modes_for_one(advantages: Tensor, *, mode: Literal["a", "b", "c"] = "a") -> Tensor:
    return advantages * (1.0 if mode == "a" else 2.0)


@component
def inert_mapping(advantages: Tensor, *, weights: dict[str, float] | None = None) -> Tensor:
    return advantages


BROKEN: list[Any] = [
    ("advantage_estimator", by_the_label, "labels_of_groups_decide_nothing", "numbers for the same prompts change"),
    (
        "advantage_normalizer",
        std_of_the_dropped,
        "dropped_groups_count_for_nothing",
        "'std_of_the_dropped': the rows of prompt 0 are dropped, and change those of the others: advantages was",
    ),
    (
        "advantage_estimator",
        first_of_the_state,
        "row_order_decides_nothing",
        "state .*first_of_the_state.seen.first was",
    ),
    ("advantage_estimator", buffer_with_the_unscored, "unscored_rows_count_for_nothing", "_unscored.rewards was"),
    (
        "advantage_normalizer",
        two_modes_for_one,
        "every_parameter_acts",
        "its parameter 'mode' acts on nothing: 'c' give what 'b' gives",
    ),
    (
        "advantage_normalizer",
        inert_mapping,
        "every_parameter_acts",
        "its parameter 'weights' acts on nothing: {'first': 0.5}, .* give what None gives",
    ),
    (
        "advantage_estimator",
        remembers_elsewhere,
        "evaluation_changes_nothing",
        "'remembers_elsewhere': an evaluation in between changes what training does: advantages was",
    ),
    (
        "advantage_estimator",
        baseline_of_all,
        "unscored_rows_count_for_nothing",
        r"rows \[0\] have no reward and change the others: state advantage_estimator.baseline_of_all.mean was",
    ),
    (
        "advantage_estimator",
        first_row_is_special,
        "row_order_decides_nothing",
        r"advantage_estimator 'first_row_is_special': rows in the order \[1, 0\] change something: advantages was",
    ),
    (
        "advantage_estimator",
        sum_of_the_group,
        "constant_groups_get_zero",
        r"'sum_of_the_group': 8 rewards of 0.7 in torch.float64 give \[0.7, .*\], not 0",
    ),
    (
        "advantage_estimator",
        mean_with_the_unscored,
        "unscored_rows_count_for_nothing",
        r"'mean_with_the_unscored': rows \[0\] have no reward and change the others: advantages was \[0.0\]",
    ),
    (
        "advantage_normalizer",
        in_place,
        "inputs_and_states_are_left_alone",
        "advantage_normalizer 'in_place': its input advantages was .* and is .* after the call",
    ),
    (
        "kl_controller",
        counts_in_its_state,
        "inputs_and_states_are_left_alone",
        r"kl_controller 'counts_in_its_state': its input state was \{\} and is \{'calls': 1\} after the call",
    ),
]
