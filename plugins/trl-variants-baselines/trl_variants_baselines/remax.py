r"""ReMax (Li et al. 2023): the greedy completion of the same prompt as the baseline, so no critic and no group.

    L = -1/N Σᵢ Σₜ Âᵢₜ log π_θ(oᵢₜ),   Âᵢₜ = Σ_{s≥t} rᵢₛ - r(greedyᵢ),   rᵢₛ = -β k1ᵢₛ, the score on the last token

Against GRPO: one completion per prompt and a greedy one besides, plain policy gradient, one update per rollout.
The baseline does not depend on the sample, so the gradient's expectation stays as it is.

β = 0.05 is that of the authors' code for Llama-2-7B. That code also takes the mean over tokens
(``loss_aggregator: token_mean``) and discounts with γ = 0.99; here are the sum over tokens and γ = 1 of the paper.
"""

from __future__ import annotations

from torch import Tensor

from trl_variants import KL, Variant, at_last_token, component, discounted_sum, select


@component(
    paper="https://arxiv.org/abs/2310.10505",
    formula=r"\hat A_{i,t} = \sum_{s \ge t} \gamma^{s-t}\, (r_{i,s} - b_{i,s}), \quad "
    r"b_i = r(\mathrm{greedy}_i) \text{ on the last token}, \quad \gamma = {gamma}",
    check=lambda p: 0 <= p.gamma <= 1 or "gamma must be between 0 and 1",
)
def remax(token_rewards: Tensor, greedy_rewards: Tensor, scored: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """The reward from each token on, minus the reward of the prompt's greedy completion.

    Aₜ = Σ_{s≥t} γ^{s-t} r_s - γ^{T-t} b, over policy tokens only, T the last of them. With γ = 1 and no KL in the
    reward it is r - b on every token.

    Args:
        token_rewards: (N, T), in reward units; KL in the reward is per token, the score on the last policy token.
        greedy_rewards: (N,) the baseline b: the reward of the greedy completion of the same prompt, before KL and
            shapers.
        scored: (N,) bool; rows without any reward get 0.
        mask: (N, T) bool, True where a token counts.
        gamma: The discount γ per policy token: 1 in the paper and verl; the authors' code has 0.99, counts one step
            more, and takes the KL of the token itself alone.

    Returns:
        (N, T) advantages, 0 at masked positions.

    References:
        Li et al., ReMax, https://arxiv.org/abs/2310.10505, algorithm 2.

    Example:
        >>> rewards, mask = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[True, True, False]])
        >>> remax(rewards, torch.tensor([0.25]), torch.tensor([True]), mask)
        tensor([[0.7500, 0.7500, 0.0000]])
    """
    baseline = at_last_token(select(greedy_rewards, scored), mask)
    advantages = discounted_sum(select(token_rewards, mask) - baseline, mask, gamma)
    return select(advantages, scored[:, None] & mask.bool())


REMAX = Variant(
    name="remax",
    extends="reinforce",
    paper="https://arxiv.org/abs/2310.10505",
    summary="The reward of the prompt's greedy completion as the baseline; one completion per prompt is enough.",
    advantage_estimator="remax",
    kl=KL("k1", placement="token_reward", coef=0.05),
)
