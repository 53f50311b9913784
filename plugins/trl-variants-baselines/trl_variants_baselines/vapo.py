r"""VAPO (Yue et al. 2025): PPO with a critic, made to work on long chains of thought with a reward at their end.

    Âₜ = Σ_l (γλ)ˡ δ_{t+l},  λ = 1 - 1/(α|oᵢ|), α = 0.05;   targets of the critic with λ = 1;   γ = 1
    L  = 1/Σ|oᵢ| Σᵢ Σₜ [ -min(ρᵢₜ Âᵢₜ, clip(ρᵢₜ, 1-0.2, 1+0.28) Âᵢₜ) - μ [oᵢ correct] log π_θ(oᵢₜ) + value loss ]
    μ  = 0.1

Against ``ppo``: λ of the policy grows with the length (|oᵢ| = 100 gives 0.8, 1000 gives 0.98), λ of the critic is 1,
clip-higher, the likelihood of correct completions besides, no KL, one epoch over each rollout. The paper trains the
critic alone for 50 steps first (``critic_warmup_steps: 50``) and takes 16 completions of a prompt.

The paper divides the likelihood term by the tokens of the correct completions; a regularizer here is a mean over all
tokens of the step, so its weight is μ times their share.
"""

from __future__ import annotations

from torch import Tensor

from trl_variants import Advantages, Variant, component, discounted_sum, following, select, use


@component(
    paper="https://arxiv.org/abs/2504.05118",
    formula=r"\hat A_{i,t} = \sum_l (\gamma \lambda_i)^l \delta_{i,t+l}, \quad "
    r"\delta_{i,t} = r_{i,t} + \gamma V_{i,t+1} - V_{i,t}, \quad "
    r"\lambda_i = \max(0,\, 1 - 1 / ({alpha} |o_i|)),\; \gamma = {gamma},\; \lambda_{\text{critic}} = {lam_returns}",
    check=lambda p: (
        (p.alpha > 0 and 0 <= p.gamma <= 1 and 0 <= p.lam_returns <= 1)
        or "alpha must be above 0, gamma and lam_returns between 0 and 1"
    ),
)
def length_adaptive_gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    *,
    gamma: float = 1.0,
    alpha: float = 0.05,
    lam_returns: float = 1.0,
    bootstrap_truncated: bool = False,
) -> Advantages:
    """Generalized advantage estimation whose λ grows with the length of the completion.

    δₜ = rₜ + γ Vₜ₊₁ - Vₜ,  Aₜ = δₜ + γλᵢ Aₜ₊₁ with λᵢ = max(0, 1 - 1/(α lᵢ)), lᵢ the policy tokens of the completion;
    Rₜ = Vₜ + the same sum with λ = ``lam_returns``. The coefficients λˡ then sum to α lᵢ, in proportion to the length.

    Args:
        token_rewards: (N, T), in reward units.
        values: (N, T), Vₜ read at the position that predicts token t, in reward units.
        mask: (N, T) bool, True where a token counts.
        truncated: (N,) bool, True where the length limit cut the completion.
        final_values: (N,) the value after the last token.
        gamma: The discount γ per policy token.
        alpha: α; the paper's 0.05 gives λ = 0 up to 20 tokens, so short completions want a larger one.
        lam_returns: λ of the critic's targets; 1 gives the whole return.
        bootstrap_truncated: Whether a cut completion bootstraps from ``final_values`` instead of 0.

    Returns:
        Advantages and returns, (N, T), 0 at masked positions.

    Raises:
        ValueError: ``bootstrap_truncated`` without ``truncated`` and ``final_values``.

    References:
        Yue et al., VAPO, https://arxiv.org/abs/2504.05118, section 4; NeMo-RL's ``length_adaptive_alpha``, which bounds
        λ at 0 too.

    Example:
        >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
        >>> result = length_adaptive_gae(rewards, values, torch.ones(1, 2), alpha=1.0)
        >>> result.advantages, result.returns
        (tensor([[0.2500, 0.5000]]), tensor([[1., 1.]]))
    """
    rewards, v, mask = select(token_rewards, mask), select(values, mask), mask.bool()
    last_value = None
    if bootstrap_truncated:
        if truncated is None or final_values is None:
            raise ValueError("bootstrap_truncated needs truncated and final_values")
        last_value = select(final_values, truncated)
    deltas = select(rewards + gamma * following(v, mask, last_value) - v, mask)
    lengths = mask.sum(1).clamp(min=1).to(v.dtype)
    lam = (1 - 1 / (alpha * lengths)).clamp(min=0)
    errors = discounted_sum(deltas, mask, gamma * lam_returns)
    return Advantages(advantages=discounted_sum(deltas, mask, gamma * lam), returns=select(errors + v, mask))


@component(
    paper="https://arxiv.org/abs/2504.05118",
    formula=r"-[r_i > {threshold}] \log \pi_\theta(o_{i,t})",
)
def positive_nll(log_probs: Tensor, rewards: Tensor, scored: Tensor | None = None, *, threshold: float = 0.0) -> Tensor:
    """Negative log-likelihood of the completions that are correct: imitate what worked.

    Args:
        log_probs: (B, T) of the current policy, in nats, with gradient.
        rewards: (B,), in reward units, KL in the reward summed in.
        scored: (B,) bool; a completion without any reward is not correct.
        threshold: A completion is correct where its reward is above this; 0 suits rewards 0 and 1, and -1 and 1.

    Returns:
        (B, T), 0 for all other completions.

    References:
        Yue et al., VAPO, https://arxiv.org/abs/2504.05118, section 4; NeMo-RL's ``positive_example_nll_weight``.

    Example:
        >>> positive_nll(torch.tensor([[-0.5], [-2.0]]), torch.tensor([1.0, 0.0]))
        tensor([[0.5000],
                [0.0000]])
    """
    correct = rewards > threshold if scored is None else (rewards > threshold) & scored.bool()
    return select(-log_probs, correct[:, None].expand_as(log_probs))


VAPO = Variant(
    name="vapo",
    extends="ppo",
    paper="https://arxiv.org/abs/2504.05118",
    summary="PPO for long reasoning: lambda grows with length, 1 for the critic; clip-higher; NLL of correct answers.",
    advantage_estimator=use("length_adaptive_gae", gamma=1.0, alpha=0.05, lam_returns=1.0),
    clip_rule=use("ppo_clip", epsilon_low=0.2, epsilon_high=0.28),
    regularizer=[use("value_loss", clip=0.2, coef=0.1), use("positive_nll", coef=0.1)],
    kl=None,
    num_iterations=1,
    reshuffle=False,
)
