"""Advantage normalizers: how advantages are scaled. They run in order after the estimator."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from trl_variants.components.masked import (
    group_table,
    is_constant,
    masked_mean,
    masked_std,
    select,
    to_tokens,
)
from trl_variants.declaration import component

__all__ = ["batch_std", "group_std"]


@component(
    paper="https://arxiv.org/abs/2402.03300",
    formula=r"\hat A_i \leftarrow \hat A_i \,/\, (\mathrm{std}_{{correction}}(r_1, \dots, r_G) + {eps})",
    check=lambda p: p.correction in (0, 1) or "correction must be 0 (population) or 1 (sample)",
    min_generations=2,
    group_centred=lambda p: p.zero_constant,
)
def group_std(
    advantages: Tensor,
    rewards: Tensor,
    scored: Tensor,
    group_ids: Tensor,
    *,
    correction: int = 0,
    eps: float = 1e-6,
    zero_constant: bool = True,
) -> Tensor:
    """Divide advantages by the standard deviation of their group's rewards.

    Âᵢ = Aᵢ / (std(r₁…r_G) + ε), one group per prompt; 0 where a group's rewards are equal or fewer than two are scored.

    Args:
        advantages: (N,) or (N, T).
        rewards: (N,), in reward units.
        scored: (N,) bool, False where no reward function scored the completion; such rows are in no statistic.
        group_ids: (N,), equal for the completions of one prompt.
        correction: 0 for the population's standard deviation (documents 000, 004), 1 for the sample's (TRL, verl).
        eps: Added to the standard deviation. TRL uses 1e-4, verl 1e-6.
        zero_constant: Whether equal rewards (range <= 1e-6 max(1, |r|)) give exactly 0 whatever ``eps`` is.

    Returns:
        Same shape as ``advantages``.

    References:
        Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.

    Example:
        >>> ids = torch.tensor([0, 0])
        >>> group_std(torch.tensor([-1., 1.]), torch.tensor([0., 2.]), torch.tensor([True, True]), ids, eps=0.)
        tensor([-1.,  1.])
    """
    table, row = group_table(rewards, scored, group_ids)
    count = (~table.isnan()).sum(1)
    deviation = table - table.nanmean(1, keepdim=True)
    # The mean of squares times n / (n - correction): the order of operations of TRL's nanstd, to the last bit.
    std = (deviation.square().nanmean(1) * count / (count - correction).clamp(min=1)).sqrt()
    usable = count >= 2
    if zero_constant:
        usable = usable & ~is_constant(table)
    usable, std = (scored & usable[row]), std[row]
    if advantages.dim() == 2:
        usable, std = usable[:, None], std[:, None]
    return select(advantages / (std + eps), usable.expand_as(advantages))


@component(
    paper="https://arxiv.org/abs/2501.03262",
    formula=r"\hat A \leftarrow (\hat A - \mathrm{mean}(\hat A)) \,/\, (\mathrm{std}_{{correction}}(\hat A) + {eps})"
    r" \text{ over the batch, by {level}}",
    check=lambda p: p.correction in (0, 1) or "correction must be 0 (population) or 1 (sample)",
)
def batch_std(
    advantages: Tensor,
    mask: Tensor,
    scored: Tensor,
    keep: Tensor | None = None,
    *,
    level: Literal["token", "completion"] = "token",
    center: bool = True,
    correction: int = 0,
    eps: float = 1e-8,
) -> Tensor:
    """Whiten advantages over the whole batch of all processes.

    Â = (A - mean(A)) / (std(A) + ε), over the rows that are scored and kept.

    Args:
        advantages: (N,) or (N, T).
        mask: (N, T) bool, True where a token counts.
        scored: (N,) bool; rows without any reward are in no statistic and get 0.
        keep: (N,) bool; rows that a sample filter dropped are in no statistic and get 0.
        level: ``token``: statistics over all valid tokens, an (N,) advantage broadcast first, so that long completions
            weigh more (verl, OpenRLHF). ``completion``: over the N completions; needs (N,) advantages.
        center: Whether the mean is subtracted.
        correction: 0 for the population's standard deviation (OpenRLHF), 1 for the sample's (verl).
        eps: Added to the standard deviation.

    Returns:
        (N, T) for ``token``, (N,) for ``completion``.

    Raises:
        ValueError: ``completion`` with advantages per token.

    References:
        Hu, REINFORCE++, https://arxiv.org/abs/2501.03262; Andrychowicz et al.,
        https://arxiv.org/abs/2006.05990, for PPO.

    Example:
        >>> rows = torch.tensor([True, True])
        >>> batch_std(torch.tensor([1.0, 3.0]), torch.ones(2, 3), rows, level="completion")
        tensor([-1.,  1.])
    """
    rows = scored.bool() if keep is None else scored.bool() & keep.bool()
    if level == "token":
        values = to_tokens(advantages, mask)
        counted = mask.bool() & rows[:, None]
    else:
        if advantages.dim() != 1:
            raise ValueError("level 'completion' needs one advantage per completion; these are per token")
        values, counted = advantages, rows
    if not counted.any() or bool(is_constant(values[counted], dim=0)):
        # Rounding error is no signal: a constant batch is 0 when centred, and has no scale to divide by.
        return select(values * 0 if center else values, counted)
    mean = masked_mean(values, counted) if center else 0.0
    return select((values - mean) / (masked_std(values, counted, correction) + eps), counted)
