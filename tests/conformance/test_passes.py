"""The conformance kit raises no false alarm about what an author may well write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from trl_variants import Advantages, ClipResult, component, use
from trl_variants.testing import check_component


@component
def power_of_the_reward(
    rewards: Tensor, scored: Tensor, *, mode: Literal["plain", "power"] = "plain", power: float = 2.0
) -> Tensor:
    return (rewards if mode == "plain" else rewards.sign() * rewards.abs() ** power) * scored


@component
def above_some_reward(rewards: Tensor, scored: Tensor, *, center: float | None = None, slope: float = 2.0) -> Tensor:
    return (rewards if center is None else (rewards - center) * slope) * scored


@component
def penalty_far_away(lengths: Tensor, *, start: int = 4096, penalty: float = 1.0) -> Tensor:
    return -penalty * (lengths > start).float()


@component(min_generations=16)
def refuses_fewer_than_16(rewards: Tensor, scored: Tensor, group_ids: Tensor) -> Tensor:
    if int(group_ids.unique(return_counts=True)[1].min()) < 16:
        raise ValueError("at least 16 completions of each prompt")
    return rewards * scored


@component
def drops_everything(rewards: Tensor) -> Tensor:
    return torch.zeros(len(rewards)).bool()


@component
def weight_by_name(
    rewards_per_func: Tensor,
    reward_names: Any,
    scored: Tensor,
    *,
    weights: dict[str, float] = {},  # noqa: B006
) -> Tensor:
    columns = zip(reward_names, rewards_per_func.nan_to_num().unbind(1), strict=True)
    return sum(weights.get(name, 1.0) * column for name, column in columns) * scored


@component(group_centred=True)
def rank_in_the_group(rewards: Tensor, scored: Tensor, group_ids: Tensor) -> Tensor:
    """Whole numbers: how many of the group are lower, less how many are higher."""
    mates = (group_ids[:, None] == group_ids) & scored[:, None] & scored
    return (mates * (rewards[:, None] - rewards).sign()).sum(1).long()


@component
def counts_weights_down(log_probs: Tensor, step: int, *, steps: int = 100) -> Tensor:
    return torch.full_like(log_probs[:, :1], max(0.0, 1 - step / steps))


@component
def recent_rewards(rewards: Tensor, scored: Tensor, keep: Tensor, state: dict) -> tuple[Tensor, dict]:
    """A baseline of all rewards so far, whose order says nothing."""
    seen = [*state.get("seen", []), *rewards[scored & keep].tolist()]
    return (rewards - sum(seen) / max(len(seen), 1)) * scored, {"seen": seen}


@component
def clips_by_entropy(log_ratio: Tensor, advantages: Tensor, entropies: Tensor, *, width: float = 0.2) -> ClipResult:
    ratio, width_here = log_ratio.exp(), width * (1 + entropies.detach())
    low, high = (ratio < 1 - width_here) & (advantages < 0), (ratio > 1 + width_here) & (advantages > 0)
    bounded = torch.minimum(torch.maximum(ratio, 1 - width_here), 1 + width_here)
    return ClipResult(loss=torch.maximum(-ratio * advantages, -bounded * advantages), low=low, high=high)


@pytest.mark.parametrize(
    ("slot", "sound"),
    [
        ("advantage_estimator", power_of_the_reward),
        ("advantage_estimator", above_some_reward),
        ("reward_shaper", penalty_far_away),
        ("advantage_estimator", refuses_fewer_than_16),
        ("sample_filter", drops_everything),
        ("advantage_estimator", weight_by_name),
        ("advantage_estimator", rank_in_the_group),
        ("token_weight", counts_weights_down),
        ("advantage_estimator", recent_rewards),
        ("clip_rule", clips_by_entropy),
    ],
)
def test_what_an_author_may_well_write_passes_whole(slot: str, sound: Callable) -> None:
    assert not check_component(slot, sound).exceptions


def test_a_parameter_that_takes_no_other_value_is_told() -> None:
    @component(check=lambda p: p.width == 0.2 or "width is 0.2")
    def only_its_default(advantages: Tensor, *, width: float = 0.2) -> Tensor:
        return advantages * width

    exceptions = check_component("advantage_normalizer", only_its_default).exceptions
    said = "no other value of width is accepted, of those that were tried"
    assert exceptions == {"every_parameter_acts": said}


@component
def total(part_advantages: list[Advantages], *, parts: list[Any] = []) -> Advantages:  # noqa: B006
    returns = [part.returns for part in part_advantages if part.returns is not None]
    each = [part.advantages for part in part_advantages]
    return Advantages(sum(a if a.dim() == 2 else a[:, None] for a in each), *returns[:1])


def test_parts_with_a_critic_or_a_state_are_held_to_the_contract() -> None:
    with_critic = {"parts": [{"advantage_estimator": "gae"}, {"advantage_estimator": "reward_to_go"}]}
    assert "unscored_rows_count_for_nothing" in check_component("advantage_estimator", total, parameters=with_critic)
    inner = {
        "advantage_estimator": use(total, parts=[{"advantage_estimator": recent_rewards}, with_critic["parts"][1]])
    }
    stateful = {"parts": [inner, with_critic["parts"][1]]}
    assert "state_survives_a_checkpoint" in check_component("advantage_estimator", total, parameters=stateful)
