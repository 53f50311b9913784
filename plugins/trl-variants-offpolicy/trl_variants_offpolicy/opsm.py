r"""Off-policy sequence mask (DeepSeek-V3.2, 2025): no lesson from a bad answer that the policy would not give any more.

    Mᵢ = 0 where Âᵢ < 0 and 1/|oᵢ| Σₜ log(π_sampler(oᵢₜ) / π_θ(oᵢₜ)) > δ, else 1
    L  = 1/N Σᵢ 1/|oᵢ| Σₜ [ -Mᵢ wᵢ min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1-ε, 1+ε) Âᵢ) + β k3ᵢₜ ],   w the rollout correction

GRPO otherwise. The report also makes KL unbiased by the importance ratio: ``kl: {weighted: true}``.
"""

from __future__ import annotations

from torch import Tensor

from trl_variants import Variant, component, masked_mean

__all__ = ["OPSM_GRPO", "off_policy_mask"]


@component(
    paper="https://arxiv.org/abs/2512.02556",
    formula=r"\mathbf{1}\left[ \hat A_{i,t} \ge 0 \text{ or } \frac{1}{|o_i|} \sum_t "
    r"\log\left( \pi_{\text{sampler}}(o_{i,t}) / \pi_\theta(o_{i,t}) \right) \le {threshold} \right]",
    check=lambda p: p.threshold >= 0 or f"threshold ({p.threshold}) must not be negative",
)
def off_policy_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sampling_log_probs: Tensor | None = None,
    *,
    threshold: float = 0.5,
) -> Tensor:
    """Mask the sequences with A < 0 that have become improbable: those with mean of log π_sampler - log π_θ above δ.

    Compared are the engine's policy and the *current* one, so that both the engine's error and the drift of the
    updates count. Where there are no engine's log-probs, the old policy's stand in, as in TRL, and only the drift
    counts. The mean is an estimate of KL(π_sampler ‖ π_θ) per token. Sequences with A >= 0 always stay.

    It multiplies the loss, and what is masked stays in the denominator: TRL's ``off_policy_mask_threshold``. ms-swift
    edits the mask instead, so that its denominators shrink.

    Args:
        log_probs: (B, T) of the current policy, in nats.
        old_log_probs: (B, T) of the trainer's policy at the rollout.
        advantages: (B, T) or (B, 1).
        mask: (B, T) bool, True where a token counts.
        sampling_log_probs: (B, T) of the engine. NaN where it could not score a token: its difference is taken as 0.
        threshold: δ, in nats per token. The report gives no value; TRL's documentation has 0.5 for an example, slime
            1e-4 by default.

    Returns:
        The shape of ``advantages``, 1 or 0.

    References:
        DeepSeek-AI, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1, equation 9; TRL 1.16.

    Example:
        >>> now, old = torch.tensor([[-3.0], [-3.0]]), torch.tensor([[-1.0], [-1.0]])
        >>> off_policy_mask(now, old, torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1))
        tensor([[1.],
                [0.]])
    """
    drawn_by = old_log_probs if sampling_log_probs is None else sampling_log_probs
    difference = (drawn_by - log_probs).detach()
    difference = difference.masked_fill(difference.isnan(), 0.0)
    divergence = masked_mean(difference, mask, dim=1)[:, None]
    return ((advantages >= 0) | (divergence <= threshold)).to(log_probs.dtype)


OPSM_GRPO = Variant(
    name="opsm_grpo",
    extends="grpo",
    paper="https://arxiv.org/abs/2512.02556",
    summary="GRPO without the negative examples that the policy has moved away from.",
    token_weight=["off_policy_mask", "rollout_correction"],
)
