r"""A weighted sum of any advantages, each estimated and normalized on its own.

    A = Σₖ wₖ Aₖ,   Aₖ = normalizersₖ(estimatorₖ(rollout))

What the parts read (rewards, KL, values, log-probs) is computed once and shared by all of them. The sum may itself be
normalized: by the variant's own ``advantage_normalizer``, which runs after it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trl_variants import Advantages, Variant, component, hookimpl, to_tokens, use

_ONE = ({"advantage_estimator": "group_mean"},)


def _consistent(p: Any) -> bool | str:
    parts, weights, returns_of = p.parts, p.weights, p.returns_of
    if not parts:
        return "parts must hold at least one {advantage_estimator: ...}"
    if weights is not None and len(weights) != len(parts):
        return f"there are {len(weights)} weights for {len(parts)} parts"
    if weights is not None and not any(weights):
        return "every weight is 0, so that nothing would be learned"
    if returns_of is not None and not 1 <= returns_of <= len(parts):
        return f"returns_of ({returns_of}) must be the number of a part, from 1 to {len(parts)}"
    return True


@component(formula=r"\hat A = \sum_k w_k \hat A^{(k)}, \quad w = {weights}", check=_consistent)
def weighted_sum(
    part_advantages: list[Advantages],
    mask: Tensor,
    *,
    parts: list[dict[str, Any]] = list(_ONE),  # noqa: B006 (components do not change their parameters)
    weights: list[float] | None = None,
    returns_of: int | None = None,
) -> Advantages:
    """The weighted sum of several advantages.

    A = Σₖ wₖ Aₖ. Advantages per completion are spread over its tokens where another part has one for each token.

    Args:
        part_advantages: One for each part, normalized: (N,) or (N, T) each.
        mask: (N, T) bool, True where a token counts.
        parts: A mapping for each part: ``advantage_estimator``, and ``advantage_normalizer`` if it has any, as in a
            variant. One part, the group's mean, by default.
        weights: A number for each part; 1 each by default.
        returns_of: The number of the part, from 1, whose returns train the critic; needed where several make them.

    Returns:
        Advantages (N,), or (N, T) where any part has that; returns (N, T) where a part makes them.

    Raises:
        ValueError: Several parts make returns and ``returns_of`` does not say which are meant, or it names one that
            makes none.

    Example:
        >>> import torch
        >>> a, b = Advantages(torch.tensor([1.0, -1.0])), Advantages(torch.tensor([[2.0, 4.0], [0.0, 0.0]]))
        >>> weighted_sum([a, b], torch.ones(2, 2), parts=[{}, {}], weights=[0.5, 1.0]).advantages
        tensor([[ 2.5000,  4.5000],
                [-0.5000, -0.5000]])
    """
    each = [part.advantages for part in part_advantages]
    if any(a.dim() == 2 for a in each):
        each = [to_tokens(a, mask) for a in each]
    shares = [a * w for a, w in zip(each, weights or [1.0] * len(each), strict=True)]
    makers = [number for number, part in enumerate(part_advantages, 1) if part.returns is not None]
    if returns_of is None and len(makers) > 1:
        raise ValueError(f"parts {makers} make returns, and a critic has one target: set returns_of to one of them")
    if returns_of is not None and returns_of not in makers:
        raise ValueError(f"returns_of is {returns_of}, and that part makes no returns")
    chosen = returns_of or (makers[0] if makers else None)
    return Advantages(sum(shares[1:], shares[0]), part_advantages[chosen - 1].returns if chosen else None)


@hookimpl
def register_advantage_estimators() -> list[Any]:
    return [weighted_sum]


@hookimpl
def register_variants() -> list[Variant]:
    return [
        Variant(
            name="ppo_grpo_blend",
            extends="ppo",
            summary="PPO whose advantage is half the critic's (GAE) and half the group's (GRPO), each normalized.",
            advantage_estimator=use(
                "weighted_sum",
                parts=[
                    {"advantage_estimator": "gae", "advantage_normalizer": "batch_std"},
                    {"advantage_estimator": "group_mean", "advantage_normalizer": "group_std"},
                ],
                weights=[0.5, 0.5],
            ),
            advantage_normalizer="none",
            num_generations=8,
        ),
    ]
