r"""Lite PPO (Liu et al. 2025, Tricks or Traps?): two tricks are enough for PPO's loss without a critic.

    Âᵢ = (rᵢ - mean(r₁…r_G)) / std(all rewards of the batch)
    L  = 1/Σ|oᵢ| Σᵢ Σₜ -min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1-ε, 1+ε) Âᵢ),   ε = 0.2

The mean is the group's and the scale the batch's: a prompt whose rewards hardly differ is not blown up. The loss is
the mean over tokens, and there is no KL. TRL has it as ``scale_rewards="batch"`` with ``loss_type="dapo"``.
"""

from __future__ import annotations

from torch import Tensor

from trl_variants import Variant, component, is_constant, masked_std, select

__all__ = ["LITE_PPO", "batch_reward_std"]


@component(
    paper="https://arxiv.org/abs/2508.08221",
    formula=r"\hat A_i \leftarrow \hat A_i \,/\, (\mathrm{std}_{{correction}}(r) + {eps}) \text{ over the batch}",
    check=lambda p: (
        (p.eps >= 0 or "eps must not be negative")
        if p.correction in (0, 1)
        else "correction must be 0 (population) or 1 (sample)"
    ),
    group_centred=True,
)
def batch_reward_std(
    advantages: Tensor,
    rewards: Tensor,
    scored: Tensor,
    keep: Tensor | None = None,
    *,
    correction: int = 0,
    eps: float = 1e-6,
    zero_constant: bool = True,
) -> Tensor:
    """Divide advantages by the standard deviation of all rewards of the batch.

    Âᵢ = Aᵢ / (std(r₁…r_N) + ε). Rewards differ within groups and between them, so that the scale is larger than
    `batch_std` of centred advantages, which sees the first only.

    Args:
        advantages: (N,) or (N, T).
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are in no statistic and get 0.
        keep: (N,) bool; rows that a sample filter dropped are in no statistic and get 0.
        correction: 0 for the population's standard deviation, 1 for the sample's (TRL).
        eps: Added to the standard deviation. TRL uses 1e-4.
        zero_constant: Whether a batch of equal rewards (range <= 1e-6 max(1, |r|)) gives exactly 0 whatever
            ``eps`` is.

    Returns:
        Same shape as ``advantages``.

    References:
        Liu et al., Part I: Tricks or Traps?, https://arxiv.org/abs/2508.08221; TRL 1.16,
        ``GRPOConfig.scale_rewards="batch"``.

    Example:
        >>> rewards, scored = torch.tensor([0.0, 2.0, 4.0, 6.0]), torch.ones(4).bool()
        >>> batch_reward_std(torch.tensor([-1.0, 1.0, -1.0, 1.0]), rewards, scored, eps=0.0)  # std sqrt(5)
        tensor([-0.4472,  0.4472, -0.4472,  0.4472])
    """
    rows = scored.bool() if keep is None else scored.bool() & keep.bool()
    std = masked_std(rewards, rows, correction)
    if zero_constant and (not rows.any() or bool(is_constant(rewards[rows], dim=0))):
        rows = rows & False
    where = rows[:, None] if advantages.dim() == 2 else rows
    return select(advantages / (std + eps), where.expand_as(advantages))


LITE_PPO = Variant(
    name="lite_ppo",
    extends="grpo",
    paper="https://arxiv.org/abs/2508.08221",
    summary="The group's mean and the whole batch's standard deviation; token mean, no KL.",
    advantage_normalizer="batch_reward_std",
    loss_aggregator="token_mean",
    kl=None,
)
