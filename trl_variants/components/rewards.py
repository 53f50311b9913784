"""Reward shapers: what is added to, or done with, the reward before the baseline.

A shaper that names ``rewards`` or ``token_rewards`` returns the new ones; one that names neither returns a term that
is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_variants.components.masked import masked_mean, masked_std, precise, select
from trl_variants.declaration import component

__all__ = ["clip_rewards", "missing_eos_penalty", "soft_overlong", "whiten_rewards", "whiten_token_rewards"]


@component(
    paper="https://arxiv.org/abs/2503.14476",
    formula=r"\mathrm{clip}\!\left(\frac{(L - c) - |o_i|}{c}, -1, 0\right), \quad "
    r"L \text{ the length limit, } c \text{ the cache}",
    check=lambda p: p.cache is None or p.cache > 0 or "cache must be above 0",
)
def soft_overlong(lengths: Tensor, max_length: int, *, cache: int | None = None) -> Tensor:
    r"""Punish completions softly as they near the length limit.

    With L = ``max_length`` and c = ``cache``: 0 up to L - c tokens, then linearly down to -1 at L, and -1 beyond.

    Args:
        lengths: (N,) tokens of each completion as generated.
        max_length: The length limit L, in tokens.
        cache: The width c of the slope, in tokens; L / 5 by default, DAPO's ratio (4096 of 20480).

    Returns:
        (N,) a term to add to the rewards, in reward units.

    Raises:
        ValueError: ``cache`` is larger than ``max_length``.

    References:
        Yu et al., DAPO, https://arxiv.org/abs/2503.14476, equation 13.

    Example:
        >>> soft_overlong(torch.tensor([16, 17, 18, 20]), 20, cache=4)
        tensor([ 0.0000, -0.2500, -0.5000, -1.0000], dtype=torch.float64)
    """
    width = max_length / 5 if cache is None else cache
    if width > max_length:
        raise ValueError(f"cache ({cache}) must not be larger than the length limit ({max_length})")
    return ((max_length - width - precise(lengths)) / width).clamp(-1, 0)


@component(
    paper="https://arxiv.org/abs/2403.17031",
    formula=r"-{penalty} \cdot [\text{no stop token}]",
    check=lambda p: p.penalty >= 0 or "penalty must not be negative; it is subtracted",
)
def missing_eos_penalty(has_eos: Tensor, *, penalty: float = 1.0) -> Tensor:
    """Subtract a constant from completions that never stopped.

    -penalty where the completion has no stop token. Judged on the completion alone; every stop id counts.

    Args:
        has_eos: (N,) bool, True where the completion ends with a stop token.
        penalty: In reward units, subtracted.

    Returns:
        (N,) a term to add to the rewards.

    References:
        Huang et al., The N+ Implementation Details of RLHF with PPO, https://arxiv.org/abs/2403.17031; TRL's
        PPOConfig.missing_eos_penalty.

    Example:
        >>> missing_eos_penalty(torch.tensor([True, False]), penalty=0.5)
        tensor([-0.0000, -0.5000], dtype=torch.float64)
    """
    return -penalty * precise(~has_eos.bool())


@component(
    formula=r"\mathrm{clip}(r_i, {low}, {high})",
    check=lambda p: p.low < p.high or f"low ({p.low}) must be below high ({p.high})",
)
def clip_rewards(rewards: Tensor, *, low: float = -10.0, high: float = 10.0) -> Tensor:
    """Clip rewards to [low, high].

    Args:
        rewards: (N,), in reward units.
        low: Lower bound. OpenRLHF's default is -10.
        high: Upper bound. OpenRLHF's default is 10.

    Returns:
        (N,) rewards.

    Example:
        >>> clip_rewards(torch.tensor([-20.0, 3.0]))
        tensor([-10.,   3.])
    """
    return rewards.clamp(low, high)


@component(
    paper="https://arxiv.org/abs/2403.17031",
    formula=r"\frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + {eps}}",
    check=lambda p: p.correction in (0, 1) or "correction must be 0 or 1",
)
def whiten_rewards(
    rewards: Tensor,
    scored: Tensor,
    keep: Tensor | None = None,
    *,
    keep_mean: bool = False,
    correction: int = 0,
    eps: float = 1e-8,
) -> Tensor:
    """Scale rewards to unit variance over the batch, so that beta and epsilon do not depend on the reward's scale.

    rᵢ ← (rᵢ - mean(r)) / (std(r) + ε), with the mean added back when ``keep_mean``.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are in no statistic and keep 0.
        keep: (N,) bool; rows that a sample filter dropped are in no statistic.
        keep_mean: Whether only the variance changes.
        correction: 0 for the population's standard deviation, 1 for the sample's.
        eps: Added to the standard deviation.

    Returns:
        (N,) rewards, in standard deviations.

    References:
        Huang et al., https://arxiv.org/abs/2403.17031.

    Example:
        >>> whiten_rewards(torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
        tensor([-1.,  1.])
    """
    counted = scored.bool() if keep is None else scored.bool() & keep.bool()
    mean = masked_mean(rewards, counted)
    white = (rewards - mean) / (masked_std(rewards, counted, correction) + eps) + (mean if keep_mean else 0.0)
    return select(white, scored)


@component(
    paper="https://arxiv.org/abs/2403.17031",
    formula=r"\frac{r_{i,t} - \mathrm{mean}(r)}{\mathrm{std}(r) + {eps}}",
    check=lambda p: p.correction in (0, 1) or "correction must be 0 or 1",
    after_kl=True,
)
def whiten_token_rewards(
    token_rewards: Tensor,
    mask: Tensor,
    scored: Tensor,
    keep: Tensor | None = None,
    *,
    keep_mean: bool = True,
    correction: int = 1,
    eps: float = 1e-8,
) -> Tensor:
    """Scale token rewards, KL included, to unit variance over all policy tokens (TRL's ``whiten_rewards``).

    Args:
        token_rewards: (N, T), in reward units.
        mask: (N, T) bool, True where a token counts.
        scored: (N,) bool; rows without any reward are in no statistic and keep theirs.
        keep: (N,) bool; rows that a sample filter dropped are in no statistic and keep theirs.
        keep_mean: Whether only the variance changes, as in TRL's PPO.
        correction: 0 for the population's standard deviation, 1 for the sample's (TRL).
        eps: Added to the standard deviation.

    Returns:
        (N, T) token rewards.

    References:
        Huang et al., https://arxiv.org/abs/2403.17031; TRL 1.12 PPOConfig.whiten_rewards.

    Example:
        >>> m = torch.tensor([[True, True]])
        >>> whiten_token_rewards(torch.tensor([[1.0, 3.0]]), m, m[:, 0], correction=0)
        tensor([[1., 3.]])
    """
    rows = scored.bool() if keep is None else scored.bool() & keep.bool()
    counted = mask.bool() & rows[:, None]
    mean = masked_mean(token_rewards, counted)
    white = (token_rewards - mean) / (masked_std(token_rewards, counted, correction) + eps)
    return torch.where(counted, white + (mean if keep_mean else 0.0), select(token_rewards, mask))
