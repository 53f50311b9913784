r"""GMPO (Zhao et al. 2025): the geometric mean of a completion's clipped token ratios, where GRPO takes the arithmetic.

    L = -1/N Σᵢ Âᵢ (Πₜ ρ̃ᵢₜ)^{1/|oᵢ|},   ρ̃ᵢₜ = min(ρᵢₜ, e^0.4) where Âᵢ > 0, else max(ρᵢₜ, e^-0.4)

The geometric mean hears an outlier only by its logarithm, so that the range of each token may be wide: 0.67 to 1.49.
Unlike GSPO, tokens are clipped one by one, before the mean. No KL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_variants import ClipResult, Variant, VariantError, bounded_exp, component, masked_mean, use

__all__ = ["GMPO", "gmpo"]


@component(
    paper="https://arxiv.org/abs/2507.20673",
    formula=r"-\hat A_{i,t} \left( \prod_t \tilde \rho_{i,t} \right)^{1/|o_i|}, \quad "
    r"\tilde \rho_{i,t} = \min(\rho_{i,t}, e^{{epsilon_high}}) \text{ where } \hat A_{i,t} > 0, \text{ else } "
    r"\max(\rho_{i,t}, e^{-{epsilon_low}})",
    check=lambda p: min(p.epsilon_low, p.epsilon_high) >= 0 or "epsilon_low and epsilon_high must not be negative",
)
def gmpo(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_low: float = 0.4, epsilon_high: float = 0.4
) -> ClipResult:
    """The geometric mean of clipped token ratios, one loss for a completion: loss = -A exp(mean of log ρ̃ₜ).

    log ρ̃ = min(log ρ, ε_high) where A > 0, else max(log ρ, -ε_low): PPO's min, in logs. A clipped token gets no
    gradient and stays in the mean. With advantages per token, which the paper does not have, each token's loss has the
    completion's ratio in value and its own gradient, as in GSPO-token (verl averages the advantages instead).

    Args:
        log_ratio: (B, T), log ρ of each token.
        advantages: (B, 1), or (B, T).
        mask: (B, T) bool, True where a token counts.
        epsilon_low: How far log ρ is rewarded for falling, in nats: a token's ratio to e^-ε_low.
        epsilon_high: How far for rising, in nats. TRL's ``epsilon_high``, there ``epsilon`` by default.

    Returns:
        Loss of the advantages' shape, and which tokens were clipped low and high, (B, T).

    Raises:
        VariantError: The ratio is one of the whole completion.

    References:
        Zhao et al., Geometric-Mean Policy Optimization, https://arxiv.org/abs/2507.20673; TRL 1.16,
        ``trl.experimental.gmpo``. verl's ``geo_mean`` is the same with ε in logs, averaged over each micro-batch.

    Example:
        >>> log_ratio = torch.tensor([[0.1, 0.9]])  # clipped to 0.1, 0.4: mean 0.25
        >>> gmpo(log_ratio, torch.tensor([[1.0]]), torch.ones(1, 2)).loss
        tensor([[-1.2840]])
    """
    if log_ratio.shape != mask.shape:
        raise VariantError("clip_rule 'gmpo' averages the ratios of tokens itself. Use importance_ratio: token.")
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=epsilon_high), log_ratio.clamp(min=-epsilon_low))
    mean = masked_mean(clipped, mask, dim=1)[:, None]
    if advantages.shape == mask.shape:
        mean = mean.detach() + (clipped - clipped.detach())
    return ClipResult(
        loss=-bounded_exp(mean) * advantages,
        low=(log_ratio < -epsilon_low) & (advantages < 0),
        high=(log_ratio > epsilon_high) & (advantages > 0),
    )


GMPO = Variant(
    name="gmpo",
    extends="grpo",
    paper="https://arxiv.org/abs/2507.20673",
    summary="The geometric mean of a completion's clipped token ratios; a wide clip in logs; no KL.",
    clip_rule=use("gmpo", epsilon_low=0.4, epsilon_high=0.4),
    kl=None,
)
