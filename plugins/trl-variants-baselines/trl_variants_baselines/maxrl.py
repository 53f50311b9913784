r"""MaxRL (Tajwar et al. 2026): towards maximum likelihood of success, by dividing by the group's mean reward.

    Âᵢ = (rᵢ - μ) / μ,   μ = mean(r₁…r_G);  0 where μ ≤ 0

With rewards 0 and 1 a prompt that succeeds with probability p weighs about 1/p: the expected gradient is that of the
first G - 1 terms of log p = -Σₖ (1-p)ᵏ/k (k = G is lost because a group that is all wrong gives 0). Against GRPO: μ in
place of the standard deviation, no KL, the mean over tokens (the authors' code).
"""

from __future__ import annotations

from torch import Tensor

from trl_variants import Variant, component, group_table, is_constant, select


@component(
    paper="https://arxiv.org/abs/2602.02710",
    formula=r"\hat A_i = (r_i - \mu) \,/\, (\mu + {eps}), \quad \mu = \mathrm{mean}(r_1, \dots, r_G)",
    check=lambda p: p.eps >= 0 or "eps must not be negative",
    min_generations=2,
    group_centred=True,
)
def maxrl(rewards: Tensor, scored: Tensor, group_ids: Tensor, *, eps: float = 0.0) -> Tensor:
    """The reward minus the group's mean, divided by the group's mean.

    Aᵢ = (rᵢ - μ) / (μ + ε); 0 where μ ≤ 0 (up to rounding, 1e-6 of the largest |r|), where a group's rewards are equal,
    or where fewer than two are scored. Meant for rewards that are not negative.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are in no mean and get 0.
        group_ids: (N,), equal for the completions of one prompt.
        eps: Added to the mean: 0 in the paper and prime-rl, 1e-6 in SkyRL.

    Returns:
        (N,) advantages.

    References:
        Tajwar et al., Maximum Likelihood Reinforcement Learning, https://arxiv.org/abs/2602.02710.

    Example:
        >>> maxrl(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.ones(4).bool(), torch.zeros(4).long())
        tensor([ 3., -1., -1., -1.])
    """
    table, row = group_table(rewards, scored, group_ids)
    mean, largest = table.nanmean(1), table.nan_to_num().abs().amax(1)
    usable = ((~table.isnan()).sum(1) >= 2) & ~is_constant(table) & (mean > 1e-6 * largest)
    mean = mean[row]
    return select((rewards - mean) / (mean + eps), scored & usable[row])


MAXRL = Variant(
    name="maxrl",
    extends="grpo",
    paper="https://arxiv.org/abs/2602.02710",
    summary="Divided by the group's mean reward, so that hard prompts weigh as in maximum likelihood of success.",
    advantage_estimator="maxrl",
    advantage_normalizer="none",
    loss_aggregator="token_mean",
    kl=None,
)
