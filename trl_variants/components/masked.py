"""Sums, means and exponentials that masks, padding and extreme values cannot spoil.

Masked values are selected away, never multiplied by 0: NaN and infinity times 0 is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "LOG_BOUND",
    "at_last_token",
    "bounded",
    "bounded_exp",
    "counted",
    "discounted_sum",
    "following",
    "group_table",
    "is_constant",
    "masked_mean",
    "masked_std",
    "masked_sum",
    "precise",
    "select",
    "to_tokens",
]

#: Log-ratios are bounded to this before exp: e^20 = 4.9e8 is far beyond any clip, and its gradient is still finite.
LOG_BOUND = 20.0


def bounded(x: Tensor) -> Tensor:
    """x within +-20; the gradient is 0 where it is cut.

    Example:
        >>> bounded(torch.tensor([0.5, -1000.0]))
        tensor([  0.5000, -20.0000])
    """
    # As clamp does, whose gradient takes four passes; this one takes one.
    return torch.nn.functional.hardtanh(x, -LOG_BOUND, LOG_BOUND)


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x) with x bounded to +-20, in value and gradient.

    Example:
        >>> bounded_exp(torch.tensor([0.0, 1000.0]))
        tensor([1.0000e+00, 4.8517e+08])
    """
    return torch.exp(bounded(x))


def select(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where ``mask``, exactly 0 elsewhere, in value and gradient, whatever stands there.

    Example:
        >>> select(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
        tensor([1., 0.])
    """
    return torch.where(mask.bool(), x, 0.0 if x.is_floating_point() else x.new_zeros(()))


def counted(x: Tensor, mask: Tensor) -> Tensor:
    """Which elements of a (·, T) or (·, 1) tensor count: tokens, or completions that have tokens."""
    return mask if x.shape == mask.shape else mask.any(1, keepdim=True)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of ``x`` where ``mask``; over everything, or over ``dim``."""
    x = select(x, mask)
    return x.sum() if dim is None else x.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of ``x`` where ``mask``; 0 where nothing is left."""
    mask = mask.expand_as(x)
    return masked_sum(x, mask, dim) / mask.count_nonzero(dim).clamp(min=1)


def masked_std(x: Tensor, mask: Tensor, correction: int = 0) -> Tensor:
    """Standard deviation of ``x`` where ``mask``, over everything; 0 where too little is left."""
    mask = mask.expand_as(x)
    variance = masked_sum((x - masked_mean(x, mask)) ** 2, mask) / (mask.sum() - correction).clamp(min=1)
    return variance.sqrt()


def is_constant(table: Tensor, dim: int = 1) -> Tensor:
    """Whether values are equal up to rounding: range <= 1e-6 max(1, |x|). NaN is no value.

    Example:
        >>> is_constant(torch.tensor([[0.7, 0.7, float("nan")], [0.0, 1.0, 0.0]]))
        tensor([ True, False])
    """
    missing = table.isnan()
    high = table.masked_fill(missing, -torch.inf).amax(dim)
    low = table.masked_fill(missing, torch.inf).amin(dim)
    scale = table.masked_fill(missing, 0).abs().amax(dim).clamp(min=1)
    return high - low <= 1e-6 * scale


def group_table(x: Tensor, scored: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Lay the values of each group out as a row.

    Args:
        x: (N,) values.
        scored: (N,) bool; the others become NaN.
        group_ids: (N,), in any order; groups may differ in size.

    Returns:
        The table, (groups, largest group), NaN where there is no value, and (N,) the table's row of each element, so
        that ``statistic(table)[row]`` is each element's group statistic.

    Example:
        >>> table, row = group_table(torch.tensor([1.0, 5.0, 3.0]), torch.ones(3).bool(), torch.tensor([7, 9, 7]))
        >>> table.nanmean(1)[row]
        tensor([2., 5., 2.])
    """
    _, row = torch.unique(group_ids, return_inverse=True)
    sizes = torch.bincount(row)
    order = torch.argsort(row, stable=True)
    column = torch.empty_like(row)
    column[order] = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row[order]]
    table = x.new_full((len(sizes), int(sizes.max())), torch.nan)
    table[row, column] = torch.where(scored.bool(), x, torch.nan)
    return table, row


def at_last_token(x: Tensor, mask: Tensor) -> Tensor:
    """Put each completion's scalar on its last policy token, 0 elsewhere; (N,) -> (N, T).

    Example:
        >>> at_last_token(torch.tensor([2.0]), torch.tensor([[1, 1, 0, 0]]))
        tensor([[0., 2., 0., 0.]])
    """
    mask = mask.bool()
    after = mask.flip(1).cumsum(1).flip(1)  # policy tokens from here on
    return select(x[:, None].expand(mask.shape), mask & (after == 1))


def following(x: Tensor, mask: Tensor, last: Tensor | None = None) -> Tensor:
    """xₜ₊₁ at each policy token: that of the next one, over masked spans; ``last`` after the last. (N, T) -> (N, T).

    Example:
        >>> following(torch.tensor([[0.1, 9.0, 0.3]]), torch.tensor([[1, 0, 1]]))
        tensor([[0.3000, 0.0000, 0.0000]])
    """
    mask = mask.bool()
    carry = x.new_zeros(len(x)) if last is None else last
    out = torch.zeros_like(x)
    for t in range(x.shape[1] - 1, -1, -1):
        out[:, t] = carry
        carry = torch.where(mask[:, t], x[:, t], carry)
    return select(out, mask)


def discounted_sum(x: Tensor, mask: Tensor, discount: float | Tensor) -> Tensor:
    """Sₜ = xₜ + discount Sₜ₊₁ over policy tokens: a masked span passes S on at no cost, and holds 0.

    Args:
        x: (N, T).
        mask: (N, T), True where a token counts.
        discount: One for all, or (N,) one for each completion.

    Returns:
        (N, T).

    Example:
        >>> discounted_sum(torch.tensor([[1.0, 9.0, 2.0]]), torch.tensor([[1, 0, 1]]), 0.5)
        tensor([[2., 0., 2.]])
    """
    mask = mask.bool()
    carry = x.new_zeros(len(x))
    out = torch.zeros_like(x)
    for t in range(x.shape[1] - 1, -1, -1):
        carry = torch.where(mask[:, t], x[:, t] + discount * carry, carry)
        out[:, t] = carry
    return select(out, mask)


def precise(x: Tensor) -> Tensor:
    """``x`` in float64, or float32 where the device has no float64 (MPS)."""
    return x.float() if x.device.type == "mps" else x.double()


def to_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """Give every token of a completion its completion's value; (N,) -> (N, T), (N, T) as it is."""
    return x[:, None].expand(mask.shape) if x.dim() == 1 else x
