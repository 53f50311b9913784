r"""Rollout corrections: weights from π_old / π_sampler, the trainer's policy at the rollout over the engine's.

    L = 1/N Σᵢ 1/|oᵢ| Σₜ [ -wᵢₜ min(ρᵢₜ Âᵢ, clip(ρᵢₜ, 1-ε, 1+ε) Âᵢ) + β k3ᵢₜ ],   ρ = π_θ / π_old

    icepop        wᵢₜ = rᵢₜ where 0.5 <= rᵢₜ <= 5, else 0,  r = π_old / π_sampler    (Ring-1T 2025)
    geo_is_grpo   wᵢ = min((Πₜ rᵢₜ)^{1/|oᵢ|}, 1.2)
    geo_rs_grpo   wᵢ = 1 where 0.999 <= (Πₜ 1/rᵢₜ)^{1/|oᵢ|} <= 1.001, else 0           (Liu, Li et al. 2025)
    k3_rs_grpo    wᵢ = 1 where mean of k3 <= 0.01, else 0

GRPO otherwise. A weight multiplies the policy loss and not the KL, and what is rejected stays in the denominator.
IcePop is the core's ``rollout_correction`` with a mask per token and two bounds. Without an engine's log-probs
(generation by transformers) every weight is 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trl_variants import Variant, bounded_exp, component, masked_mean, masked_sum, select, use

__all__ = ["VARIANTS", "geometric_correction", "rejection"]

_COLLAPSE = "https://richardli.xyz/rl-collapse"


def _log_ratio(old_log_probs: Tensor, sampling_log_probs: Tensor, mask: Tensor) -> Tensor:
    """(B, T) log π_old - log π_sampler; 0 where nothing counts or the engine could not score the token."""
    return select((old_log_probs - sampling_log_probs).detach(), mask).nan_to_num(nan=0.0)


def _ratio_bounds(p: object) -> bool | str:
    low, high = p.clip_min, p.clip_max  # type: ignore[attr-defined]
    if low is not None and low <= 0:
        return f"clip_min ({low}) bounds a ratio, so it must be above 0"
    if low is not None and high is not None and low >= high:
        return f"clip_min ({low}) must be below clip_max ({high})"
    return low is not None or high is not None or f"mode '{p.mode}' needs clip_min or clip_max"  # type: ignore[attr-defined]


@component(
    paper=_COLLAPSE,
    formula=r"\left( \pi_{\text{old}}(o_i) \,/\, \pi_{\text{sampler}}(o_i) \right)^{1/|o_i|} "
    r"\text{ ({mode}, } [{clip_min}, {clip_max}])",
    check=_ratio_bounds,
)
def geometric_correction(
    old_log_probs: Tensor,
    mask: Tensor,
    sampling_log_probs: Tensor | None = None,
    *,
    mode: Literal["truncate", "mask"] = "truncate",
    clip_max: float | None = 1.2,
    clip_min: float | None = None,
) -> Tensor | None:
    """Weigh a sequence by the geometric mean of its tokens' ratios: w = exp(mean of log π_old - log π_sampler).

    The product of the ratios, `rollout_correction`'s sequence modes, grows with length; their geometric mean does
    not, and stays near 1. Outside [clip_min, clip_max] it is clipped (``truncate``) or set to 0 (``mask``). Compared
    are the trainer's policy at the rollout and the engine's, never the current policy.

    ROLL weighs by it under the name ``geometric`` (bound 1.2), AReaL at ``level: sequence`` with ``agg: mean``. What
    ms-swift calls ``sequence_truncate`` is this; its ``sequence_mask`` judges by this and weighs by the token's ratio.

    Args:
        old_log_probs: (B, T) of the trainer's policy at the rollout, in nats.
        mask: (B, T) bool, True where a token counts.
        sampling_log_probs: (B, T) of the engine. NaN where it could not score a token: its ratio is taken as 1.
        mode: What happens outside the bounds.
        clip_max: Upper bound, or None. ROLL 1.2, ms-swift 2, AReaL 5.
        clip_min: Lower bound, or None.

    Returns:
        (B, 1); None, for 1, where the engine returns no log-probs.

    References:
        Liu, Li et al., When Speed Kills Stability, https://richardli.xyz/rl-collapse, 2025.

    Example:
        >>> old, engine = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.2, -1.0]])
        >>> geometric_correction(old, torch.ones(1, 2), engine)  # e^{0.2 / 2}
        tensor([[1.1052]])
    """
    if sampling_log_probs is None:
        return None
    weight = bounded_exp(masked_mean(_log_ratio(old_log_probs, sampling_log_probs, mask), mask, dim=1)[:, None])
    if mode == "truncate":
        return weight.clamp(clip_min, clip_max)
    low, high = clip_min if clip_min is not None else 0.0, clip_max if clip_max is not None else torch.inf
    return select(weight, (weight >= low) & (weight <= high))


def _divergence_bounds(p: object) -> bool | str:
    estimator, level, low, high = p.estimator, p.level, p.lower, p.upper  # type: ignore[attr-defined]
    if estimator != "k1":
        if low is not None:
            return f"lower ({low}) is a bound of k1 alone: {estimator} is never below 0"
        return high > 0 or f"upper ({high}) must be above 0: {estimator} is never below 0"
    if level == "seq_max":
        return "estimator 'k1' has two signs, and the largest of a sequence says nothing of the other; use k2 or k3"
    return low is None or low < high or f"lower ({low}) must be below upper ({high})"


@component(
    paper=_COLLAPSE,
    formula=r"\mathbf{1}\left[ \text{{level} of {estimator}} (\pi_{\text{sampler}}, \pi_{\text{old}}) "
    r"\in [{lower}, {upper}] \right]",
    check=_divergence_bounds,
)
def rejection(
    old_log_probs: Tensor,
    mask: Tensor,
    sampling_log_probs: Tensor | None = None,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"] = "seq_mean",
    upper: float = 0.01,
    lower: float | None = None,
) -> Tensor | None:
    """Reject tokens or sequences on which trainer and engine disagree: w = 1 where lower <= k <= upper, else 0.

    With r = π_old / π_sampler, the trainer's policy at the rollout over the engine's,

        k1 = -log r,   k2 = (log r)² / 2,   k3 = r - 1 - log r:

    three estimates, from the engine's own tokens, of KL(π_sampler ‖ π_old). A token is judged by its own, or every
    token of a sequence by their sum, mean or maximum. All bounds are on k itself, in nats. verl's are too, but for k1,
    where ``0.5_2.0`` bounds the ratio π_sampler / π_old: here that is ``lower: -0.693, upper: 0.693``, its logarithms.
    AReaL's k1 is log r, of the other sign: its bounds change places and signs.

    What is rejected has the weight 0 and stays in the denominator of the loss, as in AReaL; verl takes it out. To
    weigh what is left as well, list `rollout_correction` beside.

    Args:
        old_log_probs: (B, T) of the trainer's policy at the rollout, in nats.
        mask: (B, T) bool, True where a token counts.
        sampling_log_probs: (B, T) of the engine. NaN where it could not score a token: r is taken as 1 there.
        estimator: Which estimate.
        level: verl's names: what is judged, and by what. ``seq_mean`` does not depend on length, ``seq_sum`` does.
        upper: Largest k that is kept, in nats. verl 0.01 for seq_mean of k3.
        lower: Least k1 that is kept, in nats, or None. Of k1 alone.

    Returns:
        (B, T) for ``token``, else (B, 1); 1 or 0. None, for 1, where the engine returns no log-probs.

    References:
        Liu, Li et al., When Speed Kills Stability, https://richardli.xyz/rl-collapse, 2025; Li et al., Trust Region
        Masking, https://arxiv.org/abs/2512.23075; Schulman, http://joschu.net/blog/kl-approx.html, for k1 to k3.

    Example:
        >>> old, engine = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.0]])
        >>> rejection(old, torch.ones(1, 2), engine, estimator="k2", level="token", upper=0.1)  # 0.125 and 0
        tensor([[0., 1.]])
    """
    if sampling_log_probs is None:
        return None
    log_ratio = _log_ratio(old_log_probs, sampling_log_probs, mask)
    if estimator == "k1":
        k = -log_ratio
    elif estimator == "k2":
        k = log_ratio.square() / 2
    else:
        k = torch.expm1(log_ratio.clamp(-20, 20)) - log_ratio
    if level == "seq_sum":
        k = masked_sum(k, mask, dim=1)[:, None]
    elif level == "seq_mean":
        k = masked_mean(k, mask, dim=1)[:, None]
    elif level == "seq_max":
        k = k.amax(1, keepdim=True)  # 0 where nothing counts
    keep = k <= upper
    if lower is not None:
        keep = keep & (k >= lower)
    return keep.to(old_log_probs.dtype)


VARIANTS = [
    Variant(
        name="icepop",
        extends="grpo",
        paper="https://arxiv.org/abs/2510.18855",
        summary="GRPO whose tokens count only where trainer and engine agree within two bounds, by their ratio.",
        token_weight=use("rollout_correction", mode="token_mask", clip_min=0.5, clip_max=5.0),
    ),
    Variant(
        name="geo_is_grpo",
        extends="grpo",
        paper=_COLLAPSE,
        summary="GRPO whose sequences are weighed by the geometric mean of trainer over engine.",
        token_weight="geometric_correction",
    ),
    Variant(
        name="geo_rs_grpo",
        extends="grpo",
        paper=_COLLAPSE,
        summary="GRPO without the sequences whose geometric mean of trainer over engine is off by 0.1 %.",
        token_weight=use("rejection", estimator="k1", level="seq_mean", lower=-0.001, upper=0.001),
    ),
    Variant(
        name="k3_rs_grpo",
        extends="grpo",
        paper=_COLLAPSE,
        summary="GRPO without the sequences whose mean k3 between engine and trainer is above 0.01 nats.",
        token_weight=use("rejection", estimator="k3", level="seq_mean", upper=0.01),
    ),
]
