r"""GDPO (Liu et al. 2026): with several rewards, normalize each in its group before they are summed.

    A_i = Σ_k ω_k (r_ik - mean(r_1k…r_Gk)) / std(r_1k…r_Gk)
    Âᵢ  = (Aᵢ - mean(A)) / std(A), over the batch

GRPO normalizes the sum, so that a reward that varies little drowns in one that varies much, and different mixtures of
rewards give the same advantage. The second step keeps the scale the same for any number of rewards. The loss is GRPO's
without KL. With one reward function it is GRPO up to that second step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_variants import Variant, component, group_table, is_constant, select, use

__all__ = ["GDPO", "gdpo"]


@component(
    paper="https://arxiv.org/abs/2601.05242",
    formula=r"\hat A_i = \sum_k \omega_k \frac{r_{i,k} - \mathrm{mean}(r_k)}{\mathrm{std}_{{correction}}(r_k) + {eps}}"
    r" \text{ over each group}",
    check=lambda p: (
        (p.eps >= 0 or "eps must not be negative")
        if p.correction in (0, 1)
        else "correction must be 0 (population) or 1 (sample)"
    ),
    min_generations=2,
    group_centred=lambda p: p.zero_constant,
)
def gdpo(
    rewards_per_func: Tensor,
    reward_weights: Tensor,
    scored: Tensor,
    group_ids: Tensor,
    *,
    correction: int = 0,
    eps: float = 1e-6,
    zero_constant: bool = True,
) -> Tensor:
    """Normalize each reward function in its group, then sum: Aᵢ = Σₖ ωₖ (rᵢₖ - meanₖ) / (stdₖ + ε).

    It reads what each function returned, so that neither reward shapers nor KL in the reward reach it; a variant that
    has one is refused.

    Args:
        rewards_per_func: (N, F), in each function's own units; NaN where it returned None: such a reward is in no
            statistic and adds nothing to its completion.
        reward_weights: (F,) ωₖ.
        scored: (N,) bool; rows without any reward get 0.
        group_ids: (N,), equal for the completions of one prompt.
        correction: 0 for the population's standard deviation, 1 for the sample's (TRL, verl, ms-swift).
        eps: Added to each standard deviation. TRL uses 1e-4, verl 1e-6, ms-swift 1e-8.
        zero_constant: Whether equal rewards of a function (range <= 1e-6 max(1, |r|)) give exactly 0 for it. TRL
            and verl leave the rounding error of the mean over ``eps``.

    Returns:
        (N,) advantages, for `batch_std` to normalize: ``level: completion`` (the paper, TRL, NeMo) or ``token`` (verl).

    References:
        Liu et al., GDPO, https://arxiv.org/abs/2601.05242; TRL 1.16,
        ``GRPOConfig.multi_objective_aggregation="normalize_then_sum"``.

    Example:
        >>> rewards = torch.tensor([[1.0, 10.0], [0.0, 10.0], [1.0, 30.0], [0.0, 30.0]])
        >>> weights, ids = torch.tensor([1.0, 0.5]), torch.zeros(4).long()
        >>> gdpo(rewards, weights, torch.ones(4).bool(), ids, eps=0.0)  # +-1 of the first, +-0.5 of the second
        tensor([ 0.5000, -1.5000,  1.5000, -0.5000])
    """
    parts = []
    for column in rewards_per_func.unbind(1):
        given = scored & ~column.isnan()
        table, row = group_table(column, given, group_ids)
        count, mean = (~table.isnan()).sum(1), table.nanmean(1)
        # The mean of squares times n / (n - correction): the order of operations of TRL's nanstd, to the last bit.
        square = (table - mean[:, None]).square().nanmean(1)
        std = (square * count / (count - correction).clamp(min=1)).sqrt()
        usable = count >= 2
        if zero_constant:
            usable = usable & ~is_constant(table)
        parts.append(select((column - mean[row]) / (std[row] + eps), given & usable[row]))
    return (torch.stack(parts, dim=1) * reward_weights).sum(1)


GDPO = Variant(
    name="gdpo",
    extends="grpo",
    paper="https://arxiv.org/abs/2601.05242",
    summary="Each reward function is normalized in its group, then they are summed, then the batch is normalized.",
    advantage_estimator=use("gdpo", correction=0, eps=1e-6),
    advantage_normalizer=use("batch_std", level="completion"),
    kl=None,
)
