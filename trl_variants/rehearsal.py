"""A rehearsal: the recipe run once on a tiny made-up batch, so that what cannot run is found before a model is loaded.

It finds wrong shapes and types, components that return nothing, a loss per sequence that an aggregator would weigh by
length, and changes to the reward that the estimator would not see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trl_variants.binding import Workspace
from trl_variants.data import Batch, Rollout, Totals
from trl_variants.errors import VariantError

if TYPE_CHECKING:
    from trl_variants.recipe import Recipe

__all__ = ["rehearse"]

_TOKENS = 3


def rehearse(recipe: Recipe, max_length: int = 1 << 30) -> None:
    """Run the recipe on a made-up rollout and micro-batch; raise a `VariantError` if it cannot run.

    Args:
        recipe: What to run.
        max_length: The length limit of a completion, where it is known.
    """
    _require_seen_rewards(recipe)
    estimate = recipe.advantages(_rollout(max(2, recipe.min_generations), max_length))
    if estimate.returns is None and recipe.needs("returns"):
        reader = next(bound for bound in recipe.components if bound.info.needs("returns"))
        raise VariantError(
            f"{reader.slot} '{reader.name}' needs returns, and advantage_estimator "
            f"'{recipe.advantage_estimator.name}' makes none. Let it return Advantages(advantages, returns)."
        )
    batch = _batch()
    recipe.loss(batch)
    clip = Workspace(batch.tensors())
    clip["log_ratio"] = clip.call(recipe.importance_ratio)
    clip["token_weights"] = torch.ones(2, 1)
    clip["gather"] = lambda tensor: tensor
    per_sequence = clip.call(recipe.clip_rule).loss.shape[1] == 1
    declared = recipe.clip_rule.info.length_weighted or recipe.loss_aggregator.info.length_weighted
    if per_sequence and not declared and _weighs_by_length(recipe, batch):
        raise VariantError(
            f"importance_ratio '{recipe.importance_ratio.name}' makes one loss per sequence, and loss_aggregator "
            f"'{recipe.loss_aggregator.name}' would weigh it by the sequence's length. Use loss_aggregator: "
            "seq_mean_token_mean, or importance_ratio: sequence_token."
        )


def _require_seen_rewards(recipe: Recipe) -> None:
    """What changes the reward needs an estimator that reads the changed one."""
    estimators = [bound for bound in recipe.advantage_estimator.with_parts if bound.slot == "advantage_estimator"]
    if any({"rewards", "token_rewards"} & set(bound.info.inputs) for bound in estimators):
        return
    changes = [*recipe.reward_shapers, *([recipe.kl.placement] if recipe.kl and recipe.kl.in_reward else [])]
    if changes:
        raise VariantError(
            f"{changes[0].slot} '{changes[0].name}' has no effect: advantage_estimator "
            f"'{recipe.advantage_estimator.name}' reads neither rewards nor token_rewards. Switch it off, or use "
            "another advantage_estimator."
        )


def _weighs_by_length(recipe: Recipe, batch: Batch) -> bool:
    """Whether the same loss on every token gives a longer completion more weight."""
    x = Workspace(batch.tensors())
    losses = torch.ones(batch.mask.shape, requires_grad=True)
    x["per_token_loss"] = losses
    (gradient,) = torch.autograd.grad(x.call(recipe.loss_aggregator), losses)
    weight = gradient.sum(1)
    return not torch.allclose(weight, weight[:1].expand_as(weight))


def _rollout(generations: int, max_length: int) -> Rollout:
    """Two groups; rewards differ inside each, and lengths too."""
    rows = 2 * generations
    mask = torch.ones(rows, _TOKENS, dtype=torch.bool)
    mask[::2, 2:] = False
    rewards = torch.arange(rows) % 3 / 2
    log_probs = -torch.linspace(0.5, 1.5, rows * _TOKENS).view(rows, _TOKENS)
    return Rollout(
        rewards=rewards,
        scored=torch.ones(rows, dtype=torch.bool),
        rewards_per_func=rewards[:, None],
        reward_weights=torch.ones(1),
        reward_names=_AnyName(("reward",)),
        group_ids=torch.arange(rows) // generations,
        mask=mask,
        lengths=mask.sum(1),
        truncated=torch.zeros(rows, dtype=torch.bool),
        has_eos=torch.ones(rows, dtype=torch.bool),
        max_length=max_length,
        log_probs=log_probs,
        ref_log_probs=log_probs - 0.1,
        sampling_log_probs=log_probs + 0.1,
        values=log_probs.exp(),
        final_values=torch.zeros(rows),
        greedy_rewards=torch.full((rows,), 0.5),
    )


class _AnyName(tuple[str, ...]):
    """Names of reward functions before they are known: each is taken for the first."""

    def __contains__(self, name: object) -> bool:
        return True

    def index(self, *_: object) -> int:
        return 0


def _batch() -> Batch:
    """Two completions, of one token and of three."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    log_probs = -torch.linspace(0.5, 1.5, 2 * _TOKENS).view(2, _TOKENS)
    return Batch(
        log_probs=log_probs.clone().requires_grad_(),
        mask=mask,
        advantages=torch.tensor([[1.0], [-1.0]]),
        totals=Totals.of(mask),
        old_log_probs=log_probs + 0.05,
        ref_log_probs=log_probs - 0.1,
        sampling_log_probs=log_probs + 0.1,
        entropies=torch.full((2, _TOKENS), 0.5),
        values=torch.full((2, _TOKENS), 0.1),
        old_values=torch.zeros(2, _TOKENS),
        returns=torch.ones(2, _TOKENS),
        rewards=torch.ones(2),
        scored=torch.ones(2, dtype=torch.bool),
    )
