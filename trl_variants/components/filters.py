"""Sample filters: which rows are trained on. All filters of a variant must agree to keep a row.

Filters see the rewards before any shaping. Group statistics are taken over full groups first; what a filter drops then
counts in no loss, no denominator and no batch statistic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_variants.components.masked import group_table, is_constant
from trl_variants.declaration import component

__all__ = ["mean_band", "truncated", "zero_variance"]


def _column(
    rewards: Tensor,
    rewards_per_func: Tensor,
    reward_names: tuple[str, ...],
    scored: Tensor,
    reward: str | None,
) -> tuple[Tensor, Tensor]:
    """The total reward, or one reward function's, and where there is one."""
    if reward is None:
        return rewards, scored
    if reward not in reward_names:
        raise ValueError(f"there is no reward function named '{reward}'; there are: {', '.join(reward_names)}")
    column = rewards_per_func[:, reward_names.index(reward)]
    return column, ~column.isnan()


@component(
    paper="https://arxiv.org/abs/2503.14476",
    formula=r"\text{keep groups whose rewards differ}",
    min_generations=2,
)
def zero_variance(
    rewards: Tensor,
    rewards_per_func: Tensor,
    reward_names: tuple[str, ...],
    scored: Tensor,
    group_ids: Tensor,
    *,
    reward: str | None = None,
) -> Tensor:
    """Keep the groups whose rewards differ: the others carry no signal.

    Equal means range <= 1e-6 max(1, |r|), so that rounding is not taken for signal.

    Args:
        rewards: (N,), in reward units.
        rewards_per_func: (N, F).
        reward_names: The F names.
        scored: (N,) bool.
        group_ids: (N,), equal for the completions of one prompt.
        reward: Name of the reward function to look at; the total when left out.

    Returns:
        (N,) bool, True = keep.

    Raises:
        ValueError: There is no such reward function.

    References:
        Yu et al., DAPO, https://arxiv.org/abs/2503.14476, section 3.2.

    Example:
        >>> r, ids = torch.tensor([0.5, 0.5, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
        >>> zero_variance(r, r[:, None], ("accuracy",), torch.ones(4).bool(), ids)
        tensor([False, False,  True,  True])
    """
    column, present = _column(rewards, rewards_per_func, reward_names, scored, reward)
    table, row = group_table(column, present, group_ids)
    return ~is_constant(table)[row]


@component(
    paper="https://arxiv.org/abs/2503.14476",
    formula=r"\text{keep groups with } {low} < \mathrm{mean}(r_1, \dots, r_G) < {high}",
    check=lambda p: p.low < p.high or f"low ({p.low}) must be below high ({p.high})",
)
def mean_band(
    rewards: Tensor,
    rewards_per_func: Tensor,
    reward_names: tuple[str, ...],
    scored: Tensor,
    group_ids: Tensor,
    *,
    low: float = 0.0,
    high: float = 1.0,
    reward: str | None = None,
) -> Tensor:
    """Keep the groups whose mean reward is strictly inside a band: DAPO's 0 < accuracy < 1.

    A mean says nothing about a reward that is not 0 or 1: there `zero_variance` is the filter to use.

    Args:
        rewards: (N,), in reward units.
        rewards_per_func: (N, F).
        reward_names: The F names.
        scored: (N,) bool.
        group_ids: (N,), equal for the completions of one prompt.
        low: Lower end, excluded.
        high: Upper end, excluded.
        reward: Name of the reward function to look at; the total when left out.

    Returns:
        (N,) bool, True = keep.

    Raises:
        ValueError: There is no such reward function.

    References:
        Yu et al., DAPO, https://arxiv.org/abs/2503.14476, equation 11.

    Example:
        >>> r, ids = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
        >>> mean_band(r, r[:, None], ("accuracy",), torch.ones(4).bool(), ids)
        tensor([False, False,  True,  True])
    """
    column, present = _column(rewards, rewards_per_func, reward_names, scored, reward)
    table, row = group_table(column, present, group_ids)
    mean = table.nanmean(1)[row]
    return (mean > low) & (mean < high)


@component(paper="https://arxiv.org/abs/2503.14476", formula=r"\text{keep completions that ended by themselves}")
def truncated(truncated: Tensor) -> Tensor:
    """Drop the completions that the length limit cut (DAPO's overlong filtering).

    Args:
        truncated: (N,) bool.

    Returns:
        (N,) bool, True = keep.

    References:
        Yu et al., DAPO, https://arxiv.org/abs/2503.14476, section 3.4.

    Example:
        >>> from trl_variants.components import filters
        >>> filters.truncated(torch.tensor([True, False]))
        tensor([False,  True])
    """
    return ~truncated.to(torch.bool)
