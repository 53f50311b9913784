r"""Pass@k training: credit for what a completion adds to the best of k, not for its own success.

``pass_at_k`` (Chen et al. 2025), with c of a group's n completions correct:

    R = 1 - C(n-c, k) / C(n, k),   σ = √(R (1-R))
    Âᵢ = (1 - R) / σ  if correct,   (1 - R - C(n-c-1, k-1) / C(n-1, k-1)) / σ  if not

That is GRPO's advantage of a set of k, averaged over all sets that hold the completion; k = 1 is GRPO with rewards 0
and 1. ``grpo_passk`` (Tang et al. 2025, verl's name) has k = n and any rewards: only the best of the group gets an
advantage, by how much it surpasses the second. All else is GRPO's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_variants import Variant, component, group_table, is_constant, select, use


@component(
    paper="https://arxiv.org/abs/2508.10751",
    formula=r"\hat A_i = (1 - R - [r_i \le {threshold}]\, q) \,/\, (\sigma + {eps}), \quad "
    r"\sigma^2 = R\, (1 - R), \quad "
    r"R = 1 - C(n - c, {k}) \,/\, C(n, {k}), \quad q = C(n - c - 1, {k} - 1) \,/\, C(n - 1, {k} - 1)",
    check=lambda p: (p.k >= 1 and p.eps >= 0) or "k must be at least 1 and eps must not be negative",
    min_generations=lambda p: max(p.k, 2),
    group_centred=True,
)
def pass_at_k(
    rewards: Tensor, scored: Tensor, group_ids: Tensor, *, k: int = 4, threshold: float = 0.0, eps: float = 0.0
) -> Tensor:
    """The advantage of a completion as a member of every set of k of its group, where a set scores as its best.

    With n scored completions of which c are correct: R = 1 - C(n-c, k) / C(n, k), and Aᵢ = (1 - R) / (√(R (1-R)) + ε)
    for a correct one, (1 - R - C(n-c-1, k-1) / C(n-1, k-1)) / (√(R (1-R)) + ε) for another; 0 where every set of k
    scores alike, or fewer than k are scored.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are in no set and get 0.
        group_ids: (N,), equal for the completions of one prompt.
        k: Size of a set; num_generations must be at least as large. The paper mostly takes 4 of 32.
        threshold: A completion is correct where its reward is above this; 0 suits rewards 0 and 1, and -1 and 1.
        eps: Added to the standard deviation: 0 in the paper, 1e-6 in the authors' code.

    Returns:
        (N,) advantages.

    References:
        Chen et al., Pass@k Training, https://arxiv.org/abs/2508.10751, the analytical derivation.

    Example:
        >>> pass_at_k(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.ones(4).bool(), torch.zeros(4).long(), k=2)
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    table, row = group_table(rewards, scored, group_ids)
    total = (~table.isnan()).sum(1)
    wrong = (table <= threshold).sum(1)
    none = _all_from(wrong, total, k, rewards.dtype)
    none_with = _all_from(wrong - 1, total - 1, k - 1, rewards.dtype)  # the other k - 1, given a wrong one
    std = (none * (1 - none)).sqrt()
    usable = (total >= k) & (none > 0) & (none < 1)
    numerator = none[row] - torch.where(rewards > threshold, 0.0, none_with[row])
    return select(numerator / (std + eps)[row], scored & usable[row])


def _all_from(part: Tensor, whole: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """C(part, k) / C(whole, k): the probability that k drawn without replacement are all of the part."""
    share = torch.ones(part.shape, dtype=dtype, device=part.device)
    for drawn in range(k):
        share = share * (part - drawn).clamp(min=0) / (whole - drawn).clamp(min=1)
    return share


@component(
    paper="https://arxiv.org/abs/2503.19595",
    formula=r"\hat A_i = r_i - \max_{j \neq i} r_j \text{ where } r_i \text{ is the best of its group, else } 0",
    min_generations=2,
    group_centred=True,
)
def grpo_passk(rewards: Tensor, scored: Tensor, group_ids: Tensor) -> Tensor:
    """What the best completion of a group adds to the group's best reward; the others get 0.

    A = r₁ - r₂ for the best, r₂ the second best; 0 where two are the best, or fewer than two are scored. It is max(all)
    minus max(all but i), a leave-one-out estimate for the best of G.

    Args:
        rewards: (N,), in reward units.
        scored: (N,) bool; rows without any reward are compared with nobody and get 0.
        group_ids: (N,), equal for the completions of one prompt.

    Returns:
        (N,) advantages. verl divides them by the group's sample standard deviation: ``group_std`` with correction 1.

    References:
        Tang et al., Optimizing Language Models for Inference Time Objectives, https://arxiv.org/abs/2503.19595.

    Example:
        >>> grpo_passk(torch.tensor([0.25, 1.0, 0.5]), torch.ones(3).bool(), torch.zeros(3).long())
        tensor([0.0000, 0.5000, 0.0000])
    """
    table, row = group_table(rewards, scored, group_ids)
    usable = ((~table.isnan()).sum(1) >= 2) & ~is_constant(table)
    ranked = table.nan_to_num(nan=-torch.inf).sort(1, descending=True).values
    best, second = ranked[:, 0][row], ranked[:, min(1, ranked.shape[1] - 1)][row]
    return select(best - second, scored & usable[row] & (rewards == best))


PASS_AT_K = Variant(
    name="pass_at_k",
    extends="grpo",
    paper="https://arxiv.org/abs/2508.10751",
    summary="GRPO on sets of k completions that score as their best, averaged in closed form: rewards exploration.",
    advantage_estimator=use("pass_at_k", k=4),
    advantage_normalizer="none",
)

GRPO_PASSK = Variant(
    name="grpo_passk",
    extends="grpo",
    paper="https://arxiv.org/abs/2503.19595",
    summary="Only the best completion of a group learns, by how much it surpasses the second.",
    advantage_estimator="grpo_passk",
    advantage_normalizer=use("group_std", correction=1),
)
