r"""Leave-one-out GRPO, what NeMo-RL calls ``grpo``: the baseline and the scale of a completion are its siblings' alone.

    Âᵢ = (rᵢ - mean(rⱼ, j ≠ i)) / (std(rⱼ, j ≠ i) + ε),   unscaled where the others are equal

Against GRPO: neither the mean nor the standard deviation holds rᵢ itself. [1, 0, 0, 0] gives [1, -.577, -.577, -.577]:
the one success is not divided, since its siblings do not differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_variants import Variant, component, group_table, is_constant, select


@component(
    formula=r"\hat A_i \leftarrow \hat A_i \,/\, (\mathrm{std}_{{correction}}(r_j, j \neq i) + {eps})",
    check=lambda p: p.correction in (0, 1) or "correction must be 0 (population) or 1 (sample)",
    min_generations=3,
    group_centred=True,
)
def leave_one_out_std(
    advantages: Tensor,
    rewards: Tensor,
    scored: Tensor,
    group_ids: Tensor,
    *,
    correction: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Divide advantages by the standard deviation of the other rewards in their group.

    Âᵢ = Aᵢ / (std(rⱼ, j ≠ i) + ε); Aᵢ as it is where the others are equal, or fewer than two.

    Args:
        advantages: (N,) or (N, T).
        rewards: (N,), in reward units.
        scored: (N,) bool, False where no reward function scored the completion; such rows are in no statistic, and 0.
        group_ids: (N,), equal for the completions of one prompt.
        correction: 1 for the sample's standard deviation of the G-1 others (NeMo-RL), 0 for the population's.
        eps: Added to the standard deviation. NeMo-RL uses 1e-6.

    Returns:
        Same shape as ``advantages``.

    References:
        NeMo-RL, GRPO with ``use_leave_one_out_baseline`` and ``normalize_rewards``.

    Example:
        >>> rewards, ids = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4).long()
        >>> leave_one_out_std(torch.tensor([1.0, -1/3, -1/3, -1/3]), rewards, torch.ones(4).bool(), ids)
        tensor([ 1.0000, -0.5773, -0.5773, -0.5773])
    """
    table, row = group_table(rewards, scored, group_ids)
    number = torch.arange(len(row), device=row.device)
    numbers, _ = group_table(number.to(rewards.dtype), scored, group_ids)
    others = table[row].masked_fill(numbers[row] == number[:, None], torch.nan)  # (N, largest group)
    count = (~others.isnan()).sum(1)
    squares = (others - others.nanmean(1, keepdim=True)).square().nansum(1)
    std = (squares / (count - correction).clamp(min=1)).sqrt()
    scale = torch.where((count >= 2) & ~is_constant(others), std + eps, torch.ones_like(std))
    rows = scored.bool()
    if advantages.dim() == 2:
        scale, rows = scale[:, None], rows[:, None]
    return select(advantages / scale, rows.expand_as(advantages))


LOO_GRPO = Variant(
    name="loo_grpo",
    extends="grpo",
    summary="Baseline and scale from the other completions of the group alone, as NeMo-RL's GRPO has them.",
    advantage_estimator="leave_one_out",
    advantage_normalizer="leave_one_out_std",
)
