"""Who drew the tokens: the behaviour policy, as the rules of this plugin that compare with it know it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["behaviour"]


def behaviour(old_log_probs: Tensor, sampling_log_probs: Tensor | None) -> Tensor:
    """Log-probs of the behaviour policy: the engine's; the old policy's where the engine gave none, or NaN.

    TRL does the same for its off-policy mask. With generation by transformers the two are one policy.

    Args:
        old_log_probs: (B, T) of the trainer's policy at the rollout.
        sampling_log_probs: (B, T) of the generation engine, or None.

    Returns:
        (B, T) without gradient.

    Example:
        >>> behaviour(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, float("nan")]]))
        tensor([[-1.5000, -2.0000]])
    """
    if sampling_log_probs is None:
        return old_log_probs.detach()
    return torch.where(sampling_log_probs.isnan(), old_log_probs, sampling_log_probs).detach()
