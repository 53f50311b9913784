r"""OPO (Hao et al. 2025): the baseline that minimizes the gradient's variance, with data used exactly once.

    L = -1/N Σᵢ Σₜ Âᵢ log π_θ(oᵢₜ),   Âᵢ = rᵢ - Σⱼ |oⱼ| rⱼ / Σⱼ |oⱼ|  over the group

The optimal baseline weighs each reward by the squared norm of its gradient, which grows about as its length. Against
GRPO: that baseline, no scaling, no ratio and no clip (one update per rollout), no KL.
"""

from __future__ import annotations

from torch import Tensor

from trl_variants import Variant, component, group_table, is_constant, select


@component(
    paper="https://arxiv.org/abs/2505.23585",
    formula=r"\hat A_i = r_i - \frac{\sum_j |o_j|\, r_j}{\sum_j |o_j|} \text{ over the group}",
    min_generations=2,
    group_centred=True,
)
def opo(rewards: Tensor, scored: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """The reward minus the length-weighted mean of its group.

    Aᵢ = rᵢ - Σⱼ lⱼ rⱼ / Σⱼ lⱼ, l the policy tokens of a completion; 0 where a group's rewards are equal, fewer than two
    are scored, or no token counts. verl gives a completion that is alone in its group its raw reward.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are in no sum and get 0.
        group_ids: (N,), equal for the completions of one prompt.
        mask: (N, T) bool, True where a token counts; the lengths are its sums, so tool tokens weigh nothing.

    Returns:
        (N,) advantages.

    References:
        Hao et al., On-Policy RL with Optimal Reward Baseline, https://arxiv.org/abs/2505.23585.

    Example:
        >>> lengths = torch.tensor([[True, True, True], [True, False, False]])
        >>> opo(torch.tensor([1.0, 0.0]), torch.ones(2).bool(), torch.tensor([0, 0]), lengths)
        tensor([ 0.2500, -0.7500])
    """
    table, row = group_table(rewards, scored, group_ids)
    lengths, _ = group_table(mask.sum(1).to(rewards.dtype), scored, group_ids)
    total = lengths.nansum(1)
    # From the group's mean on, so that rounding does not grow with the rewards' own size.
    mean = table.nanmean(1)
    baseline = mean + (lengths * (table - mean[:, None])).nansum(1) / total.clamp(min=1)
    usable = ((~table.isnan()).sum(1) >= 2) & ~is_constant(table) & (total > 0)
    return select(rewards - baseline[row], scored & usable[row])


OPO = Variant(
    name="opo",
    extends="reinforce",
    paper="https://arxiv.org/abs/2505.23585",
    summary="The length-weighted mean of the group as the baseline, which minimizes variance; one update per rollout.",
    advantage_estimator="opo",
)
