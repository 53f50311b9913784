"""Few tokens out of all that the ranks hold: by value, or at random and yet the same on every run.

A random choice made by a generator would depend on the order of rows and on which rank holds them. Here every token
has a number of its own, a hash of what it is, and the tokens with the least numbers are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trl_variants import select

__all__ = ["least", "quota", "token_keys"]

Gather = Callable[[Tensor], Tensor]

#: Values are rounded to multiples of 1/1024 before they are hashed: another batch shape moves a log-prob by rounding.
_STEPS = 1024


def quota(tokens: float, share: float, at_least: int) -> int:
    """How many tokens a share of them is: rounded down, and no fewer than ``at_least`` while there are any.

    Example:
        >>> quota(10_000, 2e-4, 1), quota(100, 2e-4, 1), quota(100, 2e-4, 0), quota(0, 0.5, 1)
        (2, 1, 0, 0)
    """
    # 1e-9: a share of .29 of 100 tokens is 29, not 28.999999999999996.
    return min(max(math.floor(share * tokens + 1e-9), at_least), int(tokens))


def least(keys: Tensor, among: Tensor, number: int, gather: Gather) -> Tensor:
    """Where the ``number`` least keys are, among some tokens of all ranks. Equal keys stay or go together.

    Args:
        keys: (B, T).
        among: (B, T) bool, which tokens may be chosen.
        number: How many, the same on every rank.
        gather: Collects a tensor over ranks.

    Returns:
        (B, T) bool.

    Example:
        >>> least(torch.tensor([[4, 1, 3]]), torch.tensor([[True, False, True]]), 1, lambda x: x)
        tensor([[False, False,  True]])
    """
    found = gather(keys[among]).sort().values
    number = min(number, len(found))
    return among & (keys <= found[number - 1]) if number else torch.zeros_like(among)


def token_keys(log_probs: Tensor, advantages: Tensor, mask: Tensor, step: int) -> Tensor:
    """A random-looking 64-bit number for each token, from what the token is, and from nothing else.

    It is a hash of the optimizer step, the token's position, its completion's length, its advantage and its log-prob,
    the last two in multiples of 1/1024. So neither the order of rows nor the ranks nor the seed of a run decides it.
    Tokens that are equal in all of these have one number.

    Args:
        log_probs: (B, T) of the current policy, in nats.
        advantages: (B, T) or (B, 1).
        mask: (B, T) bool, True where a token counts.
        step: Number of the optimizer step.

    Returns:
        (B, T), int64.

    Example:
        >>> keys = token_keys(torch.tensor([[-1.0, -1.0]]), torch.ones(1, 1), torch.ones(1, 2), step=3)
        >>> bool(keys[0, 0] != keys[0, 1])
        True
    """
    position = torch.arange(mask.shape[1], device=mask.device)
    length = mask.bool().sum(1, keepdim=True)
    key = torch.full(mask.shape, step, dtype=torch.int64, device=mask.device)
    for part in (position, length, _whole(advantages, mask), _whole(log_probs, mask)):
        key = _mixed(key + part)
    return key


def _whole(x: Tensor, mask: Tensor) -> Tensor:
    """(B, T) multiples of 1/1024, int64; 0 where masked."""
    return (select(x.detach().expand(mask.shape), mask) * _STEPS).round().long()


def _mixed(key: Tensor) -> Tensor:
    """One step of SplitMix64 (Steele et al. 2014); int64 wraps around as uint64 does."""
    key = key - 0x61C8864680B583EB
    key = (key ^ _shifted(key, 30)) * -0x40A7B892E31B1A47
    key = (key ^ _shifted(key, 27)) * -0x6B2FB644ECCEEE15
    return key ^ _shifted(key, 31)


def _shifted(key: Tensor, by: int) -> Tensor:
    """Shifted right as a number without a sign."""
    return (key >> by) & ((1 << (64 - by)) - 1)
