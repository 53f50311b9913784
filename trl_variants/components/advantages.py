"""Advantage estimators: how much better a completion, or a token, was than expected.

All differ in the baseline: none or a constant (`returns`), the group's mean (`group_mean`), the others' mean
(`leave_one_out`), a learned value of each prefix (`gae`). A baseline that does not depend on the sample itself leaves
the gradient's expectation as it is and lowers its variance (document 002, section 3.3).
"""

from __future__ import annotations

from torch import Tensor

from trl_variants.components.masked import discounted_sum, following, group_table, is_constant, select
from trl_variants.data import Advantages
from trl_variants.declaration import component

__all__ = ["gae", "group_mean", "leave_one_out", "returns", "reward_to_go"]


@component(
    paper="https://doi.org/10.1007/BF00992696",
    formula=r"\hat A_i = r_i - {baseline}",
)
def returns(rewards: Tensor, scored: Tensor, *, baseline: float = 0.0) -> Tensor:
    """The reward minus a constant: REINFORCE.

    Aᵢ = rᵢ - b.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward get 0.
        baseline: The constant b, in reward units.

    Returns:
        (N,) advantages.

    References:
        Williams, Simple Statistical Gradient-Following Algorithms, 1992; documents 001 and 002.

    Example:
        >>> returns(torch.tensor([1.0, 0.0]), torch.tensor([True, True]), baseline=0.25)
        tensor([ 0.7500, -0.2500])
    """
    return select(rewards - baseline, scored)


def _centred(rewards: Tensor, scored: Tensor, group_ids: Tensor, zero_constant: bool) -> tuple[Tensor, Tensor]:
    """rᵢ - mean of its group, 0 for groups with nothing to compare; and each row's number of scored siblings."""
    table, row = group_table(rewards, scored, group_ids)
    count = (~table.isnan()).sum(1)
    usable = count >= 2
    if zero_constant:
        usable = usable & ~is_constant(table)
    centred = select(rewards - table.nanmean(1)[row], scored & usable[row])
    return centred, count[row]


@component(
    paper="https://arxiv.org/abs/2402.03300",
    formula=r"\hat A_i = r_i - \mathrm{mean}(r_1, \dots, r_G)",
    min_generations=2,
    group_centred=lambda p: p.zero_constant,
)
def group_mean(rewards: Tensor, scored: Tensor, group_ids: Tensor, *, zero_constant: bool = True) -> Tensor:
    """The reward minus the mean of its group.

    Aᵢ = rᵢ - mean(r₁…r_G), one group per prompt; 0 where a group's rewards are equal or fewer than two are scored.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are in no mean and get 0.
        group_ids: (N,), equal for the completions of one prompt.
        zero_constant: Whether equal rewards (range <= 1e-6 max(1, |r|)) give exactly 0. TRL and verl leave the
            rounding error of the mean, which a small standard deviation then blows up: 0.7 eight times gives 6e-4.

    Returns:
        (N,) advantages.

    References:
        Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.

    Example:
        >>> group_mean(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.ones(4).bool(), torch.tensor([0, 0, 1, 1]))
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    return _centred(rewards, scored, group_ids, zero_constant)[0]


@component(
    paper="https://arxiv.org/abs/2402.14740",
    formula=r"\hat A_i = r_i - \frac{1}{G-1} \sum_{j \neq i} r_j",
    min_generations=2,
    group_centred=lambda p: p.zero_constant,
)
def leave_one_out(rewards: Tensor, scored: Tensor, group_ids: Tensor, *, zero_constant: bool = True) -> Tensor:
    """The reward minus the mean of the others in its group.

    Aᵢ = rᵢ - mean(rⱼ, j ≠ i) = G/(G-1) (rᵢ - mean(r₁…r_G)). The baseline does not depend on rᵢ: unbiased.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are in no mean and get 0, and G counts the others only.
        group_ids: (N,), equal for the completions of one prompt.
        zero_constant: Whether equal rewards (range <= 1e-6 max(1, |r|)) give exactly 0.

    Returns:
        (N,) advantages.

    References:
        Ahmadian et al., Back to Basics, https://arxiv.org/abs/2402.14740; Kool et al. 2019.

    Example:
        >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.ones(4).bool(), torch.zeros(4).long())
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    centred, count = _centred(rewards, scored, group_ids, zero_constant)
    return centred * count / (count - 1).clamp(min=1)


@component(
    paper="https://arxiv.org/abs/2501.03262",
    formula=r"\hat A_{i,t} = \sum_{s \ge t} \gamma^{s-t}\, r_{i,s}, \quad \gamma = {gamma}",
    check=lambda p: 0 <= p.gamma <= 1 or "gamma must be between 0 and 1",
)
def reward_to_go(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """The discounted sum of the rewards from each token on.

    Aₜ = Σ_{s≥t} γ^{s-t} r_s, over policy tokens only: a masked span passes the sum on and costs no decay.

    Args:
        token_rewards: (N, T), in reward units.
        mask: (N, T) bool, True where a token counts.
        gamma: The discount γ per policy token.

    Returns:
        (N, T) advantages, 0 at masked positions.

    References:
        Hu, REINFORCE++, https://arxiv.org/abs/2501.03262.

    Example:
        >>> reward_to_go(torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[1, 0, 1]]), gamma=0.5)
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    return discounted_sum(token_rewards, mask, gamma)


@component(
    paper="https://arxiv.org/abs/1506.02438",
    formula=r"\hat A_{i,t} = \sum_l (\gamma \lambda)^l \delta_{i,t+l}, \quad "
    r"\delta_{i,t} = r_{i,t} + \gamma V_{i,t+1} - V_{i,t}, \quad \gamma = {gamma},\; \lambda = {lam}",
    check=lambda p: (
        all(0 <= x <= 1 for x in (p.gamma, p.lam, p.lam if p.lam_returns is None else p.lam_returns))
        or "gamma, lam and lam_returns must be between 0 and 1"
    ),
)
def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_returns: float | None = None,
    bootstrap_truncated: bool = False,
) -> Advantages:
    """Generalized advantage estimation.

    δₜ = rₜ + γ Vₜ₊₁ - Vₜ,  Aₜ = δₜ + γλ Aₜ₊₁,  Rₜ = Aₜ + Vₜ, over policy tokens only: a masked span passes A and V
    on and costs no decay, and a masked value never bootstraps. V after the last token is 0.

    Args:
        token_rewards: (N, T), in reward units.
        values: (N, T), Vₜ read at the position that predicts token t, in reward units.
        mask: (N, T) bool, True where a token counts.
        truncated: (N,) bool, True where the length limit cut the completion.
        final_values: (N,) the value after the last token.
        gamma: The discount γ per policy token.
        lam: λ; 0 gives the TD errors, 1 gives return - V.
        lam_returns: λ of the critic's targets Rₜ, where it is another one; 1 gives the whole return, which a value that
            starts wrong cannot bend.
        bootstrap_truncated: Whether a cut completion bootstraps from ``final_values`` instead of 0.

    Returns:
        Advantages and returns, (N, T), 0 at masked positions.

    Raises:
        ValueError: ``bootstrap_truncated`` without ``truncated`` and ``final_values``.

    References:
        Schulman et al., High-Dimensional Continuous Control Using GAE, https://arxiv.org/abs/1506.02438; document 001.
        A λ of its own for the targets: Yuan et al., VC-PPO, https://arxiv.org/abs/2503.01491.

    Example:
        >>> result = gae(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.1, 0.2, 0.3]]), torch.ones(1, 3))
        >>> result.advantages, result.returns
        (tensor([[0.8267, 0.7650, 0.7000]]), tensor([[0.9268, 0.9650, 1.0000]]))
    """
    rewards, v, mask = select(token_rewards, mask), select(values, mask), mask.bool()
    last_value = None
    if bootstrap_truncated:
        if truncated is None or final_values is None:
            raise ValueError("bootstrap_truncated needs truncated and final_values")
        last_value = select(final_values, truncated)
    deltas = select(rewards + gamma * following(v, mask, last_value) - v, mask)
    advantages = discounted_sum(deltas, mask, gamma * lam)
    errors = advantages if lam_returns is None else discounted_sum(deltas, mask, gamma * lam_returns)
    return Advantages(advantages=advantages, returns=select(errors + v, mask))
