"""KL to the reference: estimators per token, placements, and controllers of the coefficient.

With d = log π_θ - log π_ref. In value all estimators agree in expectation (k2 and abs only near d = 0); as losses they
differ. On-policy, the expected gradient of k2 is that of the reverse KL, of k3 that of the forward KL, and of k1 zero.
Multiplied by the differentiable importance ratio (``weighted``), k1 and k3 have the reverse KL's gradient, on- and
off-policy, and so has k2 times the detached ratio.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trl_variants.components.masked import LOG_BOUND, bounded_exp, masked_sum, select
from trl_variants.declaration import component

__all__ = ["abs_kl", "adaptive", "fixed", "k1", "k2", "k3", "loss", "sequence_reward", "token_reward"]

_SCHULMAN = "http://joschu.net/blog/kl-approx.html"


@component(paper=_SCHULMAN, formula=r"\log\pi_\theta - \log\pi_{\text{ref}}")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The unbiased estimator of least effort: k1 = d. Negative for some tokens.

    Args:
        log_probs: (·, T) of the policy, in nats.
        ref_log_probs: (·, T) of the reference.

    Returns:
        (·, T).

    References:
        Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.

    Example:
        >>> k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
        tensor([[0.5000]])
    """
    return log_probs - ref_log_probs


@component(paper=_SCHULMAN, formula=r"\tfrac{1}{2} (\log\pi_\theta - \log\pi_{\text{ref}})^2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Half the square: k2 = d² / 2. Biased in value; on-policy its gradient is the reverse KL's.

    Args:
        log_probs: (·, T) of the policy, in nats.
        ref_log_probs: (·, T) of the reference.

    Returns:
        (·, T), not negative.

    References:
        Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.

    Example:
        >>> k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
        tensor([[0.1250]])
    """
    return (log_probs - ref_log_probs).square() / 2


@component(
    paper="https://arxiv.org/abs/2402.03300",
    formula=r"\frac{\pi_{\text{ref}}}{\pi_\theta} - \log\frac{\pi_{\text{ref}}}{\pi_\theta} - 1",
)
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Unbiased and never negative: k3 = e^{-d} + d - 1, what GRPO uses.

    Args:
        log_probs: (·, T) of the policy, in nats.
        ref_log_probs: (·, T) of the reference. d is bounded below at -20, in value and gradient, so that one token
            cannot make the loss infinite.

    Returns:
        (·, T), not negative.

    References:
        Schulman, Approximating KL Divergence; Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 4.

    Example:
        >>> k3(torch.tensor([[0.5, -0.5]]), torch.zeros(1, 2))
        tensor([[0.1065, 0.1487]])
    """
    d = (log_probs - ref_log_probs).clamp(min=-LOG_BOUND)
    return torch.expm1(-d) + d  # exact also where d is small


@component(name="abs", formula=r"|\log\pi_\theta - \log\pi_{\text{ref}}|")
def abs_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The absolute difference: |d|.

    Args:
        log_probs: (·, T) of the policy, in nats.
        ref_log_probs: (·, T) of the reference.

    Returns:
        (·, T), not negative.

    Example:
        >>> abs_kl(torch.tensor([[-1.5]]), torch.tensor([[-1.0]]))
        tensor([[0.5000]])
    """
    return (log_probs - ref_log_probs).abs()


@component(paper="https://arxiv.org/abs/2203.02155", formula=r"r_{i,t} \leftarrow r_{i,t} - \beta\, \mathrm{KL}_{i,t}")
def token_reward(token_rewards: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """KL in each token's reward: rₜ = -β klₜ, the score on the last policy token. Discounted with γ like any reward.

    Args:
        token_rewards: (N, T), in reward units.
        kl: (N, T), in nats.
        mask: (N, T) bool, True where a token counts.
        kl_coef: β, in reward units per nat.

    Returns:
        (N, T) token rewards.

    References:
        Ouyang et al., InstructGPT, https://arxiv.org/abs/2203.02155, equation 2; document 002, section 2.4.

    Example:
        >>> token_reward(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 1.0]]), torch.ones(1, 2), 0.1)
        tensor([[-0.0500,  0.9000]])
    """
    return token_rewards - kl_coef * select(kl, mask)


@component(paper="https://arxiv.org/abs/2402.14740", formula=r"r_i \leftarrow r_i - \beta \sum_t \mathrm{KL}_{i,t}")
def sequence_reward(rewards: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """KL in the scalar reward, once, at the end: r ← r - β Σₜ klₜ. Not discounted.

    Args:
        rewards: (N,), in reward units.
        kl: (N, T), in nats.
        mask: (N, T) bool, True where a token counts.
        kl_coef: β, in reward units per nat.

    Returns:
        (N,) rewards.

    References:
        Ahmadian et al., Back to Basics, https://arxiv.org/abs/2402.14740.

    Example:
        >>> sequence_reward(torch.tensor([1.0]), torch.tensor([[0.5, 1.0]]), torch.ones(1, 2), 0.1)
        tensor([0.8500])
    """
    return rewards - kl_coef * masked_sum(kl, mask, dim=1)


@component(paper="https://arxiv.org/abs/2402.03300", formula=r"+ \beta\, \mathrm{KL}_{i,t}")
def loss(
    per_token_loss: Tensor,
    kl: Tensor,
    log_ratio: Tensor,
    kl_coef: float,
    *,
    weighted: bool | Literal["detached"] = False,
) -> Tensor:
    """KL as a term of each token's loss: lₜ ← lₜ + β klₜ, aggregated like the policy's.

    Args:
        per_token_loss: (B, T).
        kl: (B, T), in nats, with gradient.
        log_ratio: (B, T) or (B, 1), log ρ; bounded to +-20 before exp.
        kl_coef: β.
        weighted: Multiply kl by ρ: differentiably (True; TRL's ``use_bias_correction_kl``, on by default since 1.10),
            with ρ detached, or not at all (False; the documents).

    Returns:
        (B, T).

    References:
        Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 3; DeepSeek-V3.2,
        https://arxiv.org/abs/2512.02556, for the weight.

    Example:
        >>> loss(torch.tensor([[1.0]]), torch.tensor([[0.5]]), torch.tensor([[0.0]]), 0.1)
        tensor([[1.0500]])
    """
    if weighted:
        ratio = bounded_exp(log_ratio)
        kl = kl * (ratio.detach() if weighted == "detached" else ratio)
    return per_token_loss + kl_coef * kl


@component(formula=r"\beta \text{ constant}")
def fixed(kl_coef: float) -> float:
    """A constant coefficient.

    Args:
        kl_coef: β.

    Returns:
        β.

    Example:
        >>> fixed(0.04)
        0.04
    """
    return kl_coef


@component(
    paper="https://arxiv.org/abs/1909.08593",
    formula=r"\beta \leftarrow \beta \left( 1 + \mathrm{clip}\!\left( \frac{\mathrm{KL}}{{target}} - 1, -0.2, 0.2 "
    r"\right) \frac{n}{{horizon}} \right)",
    check=lambda p: (p.target > 0 and p.horizon > 0) or "target and horizon must be above 0",
)
def adaptive(
    kl_coef: float,
    measured_kl: float,
    measured_sequence_kl: float,
    samples: int,
    *,
    target: float = 0.1,
    horizon: float = 10000.0,
    level: Literal["token", "sequence"] = "token",
) -> float:
    """Steer the coefficient so that the KL stays near a target.

    β ← β (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), once per rollout of n completions.

    Args:
        kl_coef: β now.
        measured_kl: Mean KL per policy token over the rollout, in nats: the logged ``kl``.
        measured_sequence_kl: Mean over completions of the KL summed over tokens, in nats.
        samples: Completions in the rollout, n.
        target: The KL to hold, in nats. verl's default is 0.1 per token; Ziegler et al. held 6 per sequence.
        horizon: How many completions a correction of the whole error takes.
        level: Which of the two KLs is held: per ``token`` (verl) or per ``sequence`` (Ziegler et al.).

    Returns:
        The next β.

    References:
        Ziegler et al., Fine-Tuning Language Models from Human Preferences, https://arxiv.org/abs/1909.08593,
        section 2.2.

    Example:
        >>> round(adaptive(0.2, 0.2, 4.0, 256), 6)
        0.201024
    """
    error = (measured_kl if level == "token" else measured_sequence_kl) / target - 1
    return kl_coef * (1 + min(max(error, -0.2), 0.2) * samples / horizon)
