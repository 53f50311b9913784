"""Importance ratios: the log of pi / pi_old per token, per sequence, or fixed at one.

Each returns a log-ratio; clip rules take its exponential, bounded.
"""

from __future__ import annotations

from torch import Tensor

from trl_variants.components.masked import masked_mean, masked_sum, select
from trl_variants.declaration import component

__all__ = ["no_ratio", "sequence", "sequence_sum", "sequence_token", "token"]


@component(
    paper="https://arxiv.org/abs/1707.06347",
    formula=r"\rho_{i,t} = \pi_\theta(o_{i,t}) \,/\, \pi_{\text{old}}(o_{i,t})",
)
def token(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """One ratio per token: log ρₜ = log π(oₜ) - log π_old(oₜ).

    Args:
        log_probs: (B, T) of the current policy, in nats.
        old_log_probs: (B, T) of the policy at the rollout.

    Returns:
        (B, T).

    References:
        Schulman et al., PPO, https://arxiv.org/abs/1707.06347, equation 6.

    Example:
        >>> token(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
        tensor([[0.5000]])
    """
    return log_probs - old_log_probs


@component(
    paper="https://arxiv.org/abs/2507.18071",
    formula=r"\rho_i = \left( \pi_\theta(o_i) \,/\, \pi_{\text{old}}(o_i) \right)^{1/|o_i|}",
    level="sequence",
)
def sequence(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """One ratio per sequence, the geometric mean of the tokens': log ρ = mean of log ρₜ over the mask.

    Args:
        log_probs: (B, T) of the current policy, in nats.
        old_log_probs: (B, T) of the policy at the rollout.
        mask: (B, T) bool, True where a token counts.

    Returns:
        (B, 1); 0 for a completion without tokens.

    References:
        Zheng et al., GSPO, https://arxiv.org/abs/2507.18071, equation 7.

    Example:
        >>> sequence(torch.tensor([[1.0, 3.0, 9.0]]), torch.zeros(1, 3), torch.tensor([[1, 1, 0]]))
        tensor([[2.]])
    """
    return masked_mean(log_probs - old_log_probs, mask, dim=1)[:, None]


@component(
    paper="https://arxiv.org/abs/2507.18071",
    formula=r"\rho_{i,t} = \mathrm{sg}[\rho_i] \cdot \pi_\theta(o_{i,t}) \,/\, \mathrm{sg}[\pi_\theta(o_{i,t})]",
)
def sequence_token(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """The sequence's ratio in value, each token's own gradient (GSPO-token), so that advantages may differ by token.

    log ρₜ = sg[log ρ] + log π(oₜ) - sg[log π(oₜ)], with log ρ as in `sequence`.

    Args:
        log_probs: (B, T) of the current policy, in nats.
        old_log_probs: (B, T) of the policy at the rollout.
        mask: (B, T) bool, True where a token counts.

    Returns:
        (B, T).

    References:
        Zheng et al., GSPO, https://arxiv.org/abs/2507.18071, equation 14.

    Example:
        >>> sequence_token(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[2., 2.]])
    """
    return sequence(log_probs, old_log_probs, mask).detach() + (log_probs - log_probs.detach())


@component(
    paper="https://arxiv.org/abs/2402.14740",
    formula=r"\rho_i = \pi_\theta(o_i) \,/\, \pi_{\text{old}}(o_i)",
    level="sequence",
)
def sequence_sum(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """One ratio per sequence, the product of the tokens': what TRL's RLOOTrainer clips.

    log ρ = Σₜ log ρₜ over the mask. It grows with length; `sequence` does not.

    Args:
        log_probs: (B, T) of the current policy, in nats.
        old_log_probs: (B, T) of the policy at the rollout.
        mask: (B, T) bool, True where a token counts.

    Returns:
        (B, 1).

    Example:
        >>> sequence_sum(torch.tensor([[1.0, 3.0, 9.0]]), torch.zeros(1, 3), torch.tensor([[1, 1, 0]]))
        tensor([[4.]])
    """
    return masked_sum(select(log_probs, mask) - select(old_log_probs, mask), mask, dim=1)[:, None]


@component(name="none", formula=r"\rho_{i,t} = 1", level="one")
def no_ratio(log_probs: Tensor) -> Tensor:
    """The ratio 1 with the gradient of log π: strictly on-policy, one update per rollout.

    Args:
        log_probs: (B, T) of the current policy, in nats.

    Returns:
        (B, T) zeros whose gradient is that of ``log_probs``.

    Example:
        >>> no_ratio(torch.tensor([[-1.5]]))
        tensor([[0.]])
    """
    return log_probs - log_probs.detach()
