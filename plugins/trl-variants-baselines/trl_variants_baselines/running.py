r"""REINFORCE with a baseline that remembers: a mean of the rewards of earlier rollouts.

    L = -1/N Σᵢ Σₜ (rᵢ - b) log π_θ(oᵢₜ)

``reinforce_running``: b is the mean of all rewards so far. ``reinforce_ema``: b is their exponential moving average, as
in SPIRAL's role-conditioned advantage estimation (Liu et al. 2025), with one role. Against GRPO: a baseline over time
and not over a group, so one completion per prompt is enough; no ratio, one update per rollout, no KL.

b comes from earlier rollouts alone by default, so the gradient has no bias. It is kept in checkpoints, and an
evaluation uses it without moving it.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from trl_variants import Variant, component, masked_mean, select


@component(
    formula=r"\hat A_i = r_i - b, \quad b = \text{mean of all rewards so far}",
    check=lambda p: (
        not (p.include_current and p.start)
        or "start has no effect with include_current: the first rollout has a mean of its own"
    ),
)
def running_baseline(
    rewards: Tensor,
    scored: Tensor,
    state: dict[str, Any],
    keep: Tensor | None = None,
    *,
    start: float = 0.0,
    include_current: bool = False,
) -> tuple[Tensor, dict[str, Any]]:
    """The reward minus the mean of all rewards of the run so far.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are in no mean and get 0.
        state: ``count`` and ``mean`` of the rewards so far.
        keep: (N,) bool; rows that a sample filter dropped are in no mean.
        start: The baseline of the first rollout, in reward units.
        include_current: Whether this rollout's rewards are in the mean that they are compared with, as in ROLL's
            ``running``: a small bias, and a baseline from the first rollout on.

    Returns:
        (N,) advantages and the new state.

    Example:
        >>> state = {"count": 3, "mean": 0.5}
        >>> running_baseline(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), state)
        (tensor([0.5000, 0.0000]), {'count': 4, 'mean': 0.625})
    """
    old_count, old_mean = state.get("count", 0), state.get("mean", start)
    mean, count = _mean(rewards, scored, keep)
    new_count = old_count + count
    new_mean = old_mean + (mean - old_mean) * count / new_count if new_count else old_mean
    baseline = new_mean if include_current else old_mean
    return select(rewards - baseline, scored), {"count": new_count, "mean": new_mean}


@component(
    paper="https://arxiv.org/abs/2506.24119",
    formula=r"\hat A_i = r_i - b, \quad b \leftarrow {decay}\, b + (1 - {decay})\, \mathrm{mean}(r)",
    check=lambda p: 0 <= p.decay < 1 or "decay must be at least 0 and below 1",
)
def ema_baseline(
    rewards: Tensor,
    scored: Tensor,
    state: dict[str, Any],
    keep: Tensor | None = None,
    *,
    decay: float = 0.95,
    start: float = 0.0,
    per: Literal["rollout", "completion"] = "rollout",
    include_current: bool = False,
) -> tuple[Tensor, dict[str, Any]]:
    """The reward minus an exponential moving average of earlier rewards.

    b ← γb + (1-γ) mean(r), γ the decay, once per rollout; Aᵢ = rᵢ - b.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are in no mean and get 0.
        state: ``baseline``, b.
        keep: (N,) bool; rows that a sample filter dropped are in no mean.
        decay: γ. 0.95 in SPIRAL and prime-rl's ``rae``.
        start: b before the first rollout, in reward units.
        per: ``rollout``: the average moves one step per rollout. ``completion``: one step per completion, γⁿ for n of
            them, as in SPIRAL and prime-rl, which take them one after the other; here all n steps go to their mean, so
            that the order of the rows decides nothing.
        include_current: Whether b moves before the advantages are taken (as SPIRAL writes it, with a small bias) and
            not after (prime-rl).

    Returns:
        (N,) advantages and the new state.

    References:
        Liu et al., SPIRAL, https://arxiv.org/abs/2506.24119; Williams 1992 on reinforcement baselines.

    Example:
        >>> ema_baseline(torch.tensor([1.0, 0.0]), torch.tensor([True, True]), {"baseline": 0.25}, decay=0.5)
        (tensor([ 0.7500, -0.2500]), {'baseline': 0.375})
    """
    old = state.get("baseline", start)
    mean, count = _mean(rewards, scored, keep)
    kept = decay ** (count if per == "completion" else min(count, 1))
    new = kept * old + (1 - kept) * mean
    return select(rewards - (new if include_current else old), scored), {"baseline": new}


def _mean(rewards: Tensor, scored: Tensor, keep: Tensor | None) -> tuple[float, int]:
    """Mean and number of the rewards that count; 0 and 0 without any."""
    rows = scored.bool() if keep is None else scored.bool() & keep.bool()
    return float(masked_mean(rewards, rows)), int(rows.sum())


REINFORCE_RUNNING = Variant(
    name="reinforce_running",
    extends="reinforce",
    summary="The mean of all rewards of earlier rollouts as the baseline; one completion per prompt is enough.",
    advantage_estimator="running_baseline",
)

REINFORCE_EMA = Variant(
    name="reinforce_ema",
    extends="reinforce",
    paper="https://arxiv.org/abs/2506.24119",
    summary="A moving average of earlier rewards as the baseline; one completion per prompt is enough.",
    advantage_estimator="ema_baseline",
)
