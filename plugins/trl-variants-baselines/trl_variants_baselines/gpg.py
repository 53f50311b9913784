r"""GPG (Chu et al. 2025): the policy gradient itself, with the groups that carry no signal taken out of the mean.

    L = -1/Σ|oᵢ| Σᵢ Σₜ Âᵢ log π_θ(oᵢₜ),   Âᵢ = α (rᵢ - mean(r₁…r_G)),   α = B / (B - M)

B counts the completions of the batch, M those of groups whose rewards are all equal: they add nothing to the gradient
but stand in its denominator. Against GRPO: α, no scaling by the standard deviation (``advantage_normalizer:
group_std`` is the paper's other choice of F_norm), no ratio, no clip, no KL, the mean over tokens.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from trl_variants import Variant, component, group_table, is_constant, select


@component(
    paper="https://arxiv.org/abs/2504.02546",
    formula=r"\hat A_i = \alpha\, (r_i - \mathrm{mean}(r_1, \dots, r_G)), \quad \alpha = B \,/\, B_{counted}",
    min_generations=2,
    group_centred=True,
)
def gpg(
    rewards: Tensor,
    scored: Tensor,
    group_ids: Tensor,
    keep: Tensor | None = None,
    *,
    counted: Literal["varied", "nonzero"] = "varied",
) -> Tensor:
    """The reward minus the group's mean, times α = completions of the batch / completions that count.

    Aᵢ = α (rᵢ - mean(r₁…r_G)); 0 where a group's rewards are equal or fewer than two are scored.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are in no statistic and get 0.
        group_ids: (N,), equal for the completions of one prompt. The mean is over all scored rows of a group.
        keep: (N,) bool; rows that a sample filter dropped are in neither count of α. Where a filter drops the groups of
            equal rewards, α is 1.
        counted: Which completions α counts. ``varied``: those in groups whose rewards differ (the paper: all but groups
            all right or all wrong). ``nonzero``: those whose reward is not 0 (verl).

    Returns:
        (N,) advantages.

    References:
        Chu et al., GPG, https://arxiv.org/abs/2504.02546.

    Example:
        >>> rewards, ids = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
        >>> gpg(rewards, torch.ones(4).bool(), ids)
        tensor([ 1., -1.,  0.,  0.])
    """
    table, row = group_table(rewards, scored, group_ids)
    varied = (((~table.isnan()).sum(1) >= 2) & ~is_constant(table))[row] & scored
    batch = scored if keep is None else scored & keep.bool()
    informative = batch & (varied if counted == "varied" else rewards != 0)
    alpha = batch.sum().to(rewards.dtype) / informative.sum().clamp(min=1)
    return select(alpha * (rewards - table.nanmean(1)[row]), varied)


GPG = Variant(
    name="gpg",
    extends="reinforce",
    paper="https://arxiv.org/abs/2504.02546",
    summary="Group mean, rescaled so that groups of equal rewards do not shrink the gradient; plain policy gradient.",
    advantage_estimator="gpg",
    loss_aggregator="token_mean",
)
