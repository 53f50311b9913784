r"""VESPO (2026): the policy gradient, weighted by a smooth kernel of the whole completion's importance weight.

    L = -1/Σ|oᵢ| Σᵢ Σₜ sg[φ(Wᵢ)] Âᵢ log π_θ(oᵢₜ),   φ(W) = W^k e^{λ (1 - W)},   Wᵢ = π_θ(oᵢ) / π_sampler(oᵢ)
    (k, λ) = (2, 3) where Âᵢ >= 0, else (3, 2)

W is the true ratio of a completion, the product over its tokens, and no power of it: it leaves 1 quickly, and the
kernel then lets the completion go, on both sides. W goes back to the engine that drew the completion, so that the
rollout correction is a factor inside of φ, not one on the loss. No clip and no KL.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trl_variants import ClipResult, Variant, component, masked_sum, select, use

__all__ = ["VESPO", "vespo"]

#: The least W that the authors' code and TRL tell apart, and the largest, in logs; the largest φ too.
_LOWEST, _HIGHEST = math.log(1e-8), 20.0


@component(
    paper="https://arxiv.org/abs/2602.10693",
    formula=r"-\mathrm{sg}[\varphi(\rho_{i,t} \prod_t w_{i,t})]\, \hat A_{i,t} \log \pi_\theta(o_{i,t}), \quad "
    r"\varphi(W) = W^k e^{\lambda (1 - W)}, \quad (k, \lambda) = ({k_pos}, {lambda_pos}) \text{ where } "
    r"\hat A_{i,t} \ge 0, \text{ else } ({k_neg}, {lambda_neg})",
    check=lambda p: (
        (min(p.k_pos, p.k_neg) >= 0 or "k_pos and k_neg must not be negative")
        if min(p.lambda_pos, p.lambda_neg) > 0
        else "lambda_pos and lambda_neg must be above 0"
    ),
)
def vespo(
    log_ratio: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    token_weights: Tensor,
    mask: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    zero_weight: Literal["token", "sequence"] = "token",
) -> ClipResult:
    """The policy gradient with a Gamma-shaped weight: loss = -sg[φ(W)] A log π, φ(W) = W^k e^{λ (1 - W)}, φ(1) = 1.

    W is the ratio times the token weights: with ``importance_ratio: sequence_sum`` the completion's ratio times the
    product of its tokens' weights, one W for a completion; with a ratio per token, one W for each. φ is largest at
    W = k/λ; at most e^20 here. Nothing is cut, so that nothing is reported as clipped.

    Args:
        log_ratio: (B, 1) log π_θ / π_old of the completion, or (B, T) of each token.
        log_probs: (B, T) of the current policy, in nats.
        advantages: (B, T) or (B, 1).
        token_weights: (B, T) or (B, 1), such as a rollout correction π_old / π_sampler. They enter W, not the loss.
        mask: (B, T) bool, True where a token counts.
        k_pos: The power of W where A >= 0: how fast completions fade that became less likely.
        lambda_pos: The decay in W where A >= 0: how fast those fade that became more likely.
        k_neg: The power where A < 0.
        lambda_neg: The decay where A < 0.
        zero_weight: What a weight of 0 on one token takes out of the loss: that ``token``, whose weight is then no
            factor of W either; or the whole ``sequence`` (TRL: the 0 enters W as 1e-8), so that with
            ``rollout_correction: {mode: token_mask}`` one masked token drops its completion.

    Returns:
        Loss (B, T).

    References:
        VESPO, https://arxiv.org/abs/2602.10693, appendix I, whose c1 and c2 are k and λ here; TRL 1.16,
        ``GRPOTrainer.get_gamma_weights``.

    Example:
        >>> ratio, log_probs = torch.tensor([[1.0], [2.0]]), torch.tensor([[-1.0], [-1.0]])
        >>> weights = mask = torch.ones(2, 1)
        >>> vespo(ratio.log(), log_probs, torch.tensor([[1.0], [1.0]]), weights, mask).loss  # 1, 2^2 e^-3
        tensor([[1.0000],
                [0.1991]])
    """
    logs = token_weights.clamp(min=math.exp(_LOWEST)).log()
    if zero_weight == "token":
        logs = select(logs, token_weights > 0)
    if logs.shape == mask.shape != log_ratio.shape:
        logs = masked_sum(logs, mask, dim=1)[:, None]
    log_w = (log_ratio.detach() + logs).clamp(_LOWEST, _HIGHEST)
    k = torch.where(advantages >= 0, log_w.new_full((), k_pos), log_w.new_full((), k_neg))
    lam = torch.where(advantages >= 0, log_w.new_full((), lambda_pos), log_w.new_full((), lambda_neg))
    phi = (lam + k * log_w - lam * log_w.exp()).clamp(max=_HIGHEST).exp()
    loss = -phi * advantages * log_probs
    return ClipResult(loss=select(loss, token_weights > 0) if zero_weight == "token" else loss)


VESPO = Variant(
    name="vespo",
    extends="grpo",
    paper="https://arxiv.org/abs/2602.10693",
    summary="A smooth kernel of the whole completion's importance weight instead of a clip; token mean, no KL.",
    importance_ratio="sequence_sum",
    clip_rule=use("vespo", k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0),
    token_weight=use("rollout_correction", mode="token_truncate", clip_max=3.0),
    loss_aggregator="token_mean",
    kl=None,
)
