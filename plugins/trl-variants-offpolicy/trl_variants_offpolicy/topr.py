r"""TOPR (Le Roux et al. 2025), tapered off-policy REINFORCE: imitate what is good, unlearn only what is still likely.

    L = -1/N Σᵢ wᵢ Aᵢ log π_θ(oᵢ),   wᵢ = 1 where Aᵢ >= 0, else min(π_θ(oᵢ) / π_sampler(oᵢ), 1),   Aᵢ = rᵢ - b

Off-policy, REINFORCE pushes bad answers down for ever, and the policy falls apart; here each push fades with the
answer's own probability. Good answers need no ratio: that is maximum likelihood. Any number of updates per rollout,
no KL, no clip. The paper's rewards are 1 and -1; with rewards of 0 and 1 set ``advantage_estimator: {baseline: 0.5}``,
or take the group's mean.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trl_variants import ClipResult, Variant, bounded_exp, component, masked_sum
from trl_variants_offpolicy.behaviour import behaviour

__all__ = ["TOPR", "topr"]


@component(
    paper="https://arxiv.org/abs/2503.14286",
    formula=r"-\mathrm{sg}[w_i]\, \hat A_{i,t} \log \pi_\theta(o_{i,t}), \quad w_i = 1 \text{ where } "
    r"\hat A_{i,t} \ge 0, \text{ else } \min(\pi_\theta / \pi_{\text{sampler}}, 1) \text{ of the {level}}",
)
def topr(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sampling_log_probs: Tensor | None = None,
    *,
    level: Literal["sequence", "token"] = "sequence",
) -> ClipResult:
    """Taper negative examples off: loss = -sg[w] A log π_θ, w = 1 where A >= 0, else π_θ / π_sampler held in [0, 1].

    The ratio is of the current policy over the one that drew the tokens: of the whole completion, the product of its
    tokens' (the paper), or of each token (ROLL). Where there are no engine's log-probs, the old policy's stand in.
    Positive and negative are by the sign of the advantage, the paper's reward less its baseline; ROLL goes by the
    sign of the score.

    Args:
        log_probs: (B, T) of the current policy, in nats.
        old_log_probs: (B, T) of the trainer's policy at the rollout; read where the engine gives nothing.
        advantages: (B, T) or (B, 1).
        mask: (B, T) bool, True where a token counts.
        sampling_log_probs: (B, T) of the engine. NaN where it could not score a token.
        level: Whose ratio: the ``sequence``'s or the ``token``'s.

    Returns:
        Loss (B, T), and as high the tokens with A < 0 whose ratio was cut to 1.

    References:
        Le Roux et al., Tapered Off-Policy REINFORCE, https://arxiv.org/abs/2503.14286, equation 8.

    Example:
        >>> now, drawn = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.5, 0.4]]).log()
        >>> topr(now, drawn, torch.tensor([[-1.0]]), torch.ones(1, 2)).loss  # 1/2 log 0.5, 1/2 log 0.2
        tensor([[-0.3466, -0.8047]])
    """
    log_ratio = log_probs.detach() - behaviour(old_log_probs, sampling_log_probs)
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, dim=1)[:, None]
    negative = advantages < 0
    weight = torch.where(negative, bounded_exp(log_ratio.clamp(max=0)), 1.0)
    high = (negative & (log_ratio > 0)).expand_as(log_probs)
    return ClipResult(loss=-weight * advantages * log_probs, high=high)


TOPR = Variant(
    name="topr",
    extends="reinforce",
    paper="https://arxiv.org/abs/2503.14286",
    summary="REINFORCE that may reuse its rollouts: negative examples fade with their probability.",
    clip_rule="topr",
    token_weight="none",
    max_updates_per_rollout=None,
)
