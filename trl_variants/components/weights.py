"""Token weights: detached factors on the policy loss, before KL is added."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trl_variants.components.masked import bounded_exp, masked_sum, select
from trl_variants.declaration import component

__all__ = ["rollout_correction"]


def _bounds(p: object) -> bool | str:
    low, high, mode = p.clip_min, p.clip_max, p.mode  # type: ignore[attr-defined]
    if low is not None and high is not None and low >= high:
        return f"clip_min ({low}) must be below clip_max ({high})"
    if mode.endswith("truncate") and low is None and high is None:
        return f"mode '{mode}' needs clip_min or clip_max"
    return True


@component(
    paper="https://fengyao.notion.site/off-policy-rl",
    formula=r"\pi_{\text{old}} / \pi_{\text{sampler}} \text{ ({mode}, } [{clip_min}, {clip_max}])",
    check=_bounds,
)
def rollout_correction(
    old_log_probs: Tensor,
    mask: Tensor,
    sampling_log_probs: Tensor | None = None,
    *,
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor | None:
    """Correct for the generation engine's probabilities differing from the trainer's.

    w = π_old / π_sampler, per token, or their product per sequence; outside [clip_min, clip_max] it is clipped
    (``truncate``) or set to 0 (``mask``).

    Args:
        old_log_probs: (B, T) of the trainer's policy at the rollout, in nats.
        mask: (B, T) bool, True where a token counts.
        sampling_log_probs: (B, T) of the engine. NaN where it could not score a token: that token is not corrected.
        mode: Level and constraint; TRL's ``vllm_importance_sampling_mode``.
        clip_max: Upper bound, or None.
        clip_min: Lower bound, or None.

    Returns:
        (B, T) for the token modes, (B, 1) for the sequence modes; None, for 1, where the engine returns no log-probs
        (generation by transformers).

    References:
        Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025; TRL 1.16.

    Example:
        >>> old, engine = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.0]])
        >>> rollout_correction(old, torch.ones(1, 2), engine, mode="token_truncate", clip_max=2.0)
        tensor([[2., 1.]])
    """
    if sampling_log_probs is None:
        return None
    difference = select((old_log_probs - sampling_log_probs).detach(), mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        difference = masked_sum(difference, mask, dim=1)[:, None]
    weight = bounded_exp(difference)
    if mode.endswith("truncate"):
        return weight.clamp(clip_min, clip_max)
    low, high = clip_min if clip_min is not None else -torch.inf, clip_max if clip_max is not None else torch.inf
    return select(weight, (weight >= low) & (weight <= high))
