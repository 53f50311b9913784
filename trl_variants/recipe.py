"""The whole algorithm, top to bottom: `Recipe.advantages` once per rollout, `Recipe.loss` once per micro-batch.

A recipe holds no state and knows nothing of ranks, gradient accumulation or models; the trainer passes the KL
coefficient and the components' states in, and takes the new ones out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trl_variants import metrics
from trl_variants.binding import Bound, States, Workspace
from trl_variants.components.masked import bounded, masked_sum
from trl_variants.data import Batch, Metric, Rollout
from trl_variants.errors import VariantError
from trl_variants.registry import Owner
from trl_variants.variant import Variant

__all__ = ["AdvantageResult", "BoundKL", "LossResult", "Recipe"]


@dataclass(frozen=True)
class BoundKL:
    """The KL term of a recipe."""

    estimator: Bound
    placement: Bound
    controller: Bound
    coef: float

    @property
    def in_reward(self) -> bool:
        """Whether KL enters the reward, in the rollout phase, rather than the loss."""
        return "per_token_loss" not in self.placement.info.inputs

    @property
    def measured(self) -> bool:
        """Whether KL must be known at the rollout: it enters the reward, or a controller steers by it."""
        return self.in_reward or any(name.startswith("measured") for name in self.controller.info.inputs)


@dataclass(frozen=True)
class AdvantageResult:
    """What `Recipe.advantages` returns.

    Attributes:
        advantages: (N,) or (N, T).
        returns: (N, T) targets of the critic, or None.
        keep: (N,) bool; False for the rows that a sample filter dropped.
        rewards: (N,) the rewards that the estimator saw, KL in the reward summed in.
        next_kl_coef: The KL coefficient for the next rollout, or None without KL.
        metrics: Numbers to log, by name.
        states: The components' states after this rollout.
    """

    advantages: Tensor
    returns: Tensor | None
    keep: Tensor
    rewards: Tensor
    next_kl_coef: float | None
    metrics: dict[str, Metric] = field(default_factory=dict)
    states: States = field(default_factory=dict)


@dataclass(frozen=True)
class LossResult:
    """What `Recipe.loss` returns.

    Attributes:
        loss: Scalar: this micro-batch's share of the loss of its optimizer step.
        observed: What the metrics of its step are made of; see `metrics.of_step`.
        states: The components' states after this micro-batch.
    """

    loss: Tensor
    observed: metrics.Observed
    states: States = field(default_factory=dict)

    @functools.cached_property
    def metrics(self) -> dict[str, Metric]:
        """Numbers to log, by name: those of this micro-batch alone."""
        return metrics.of_step((self.observed,))


@dataclass(frozen=True)
class Recipe:
    """A variant with every component bound, and who registered it. Made by `resolve`."""

    variant: Variant
    sample_filters: tuple[Bound, ...]
    reward_shapers: tuple[Bound, ...]
    kl: BoundKL | None
    advantage_estimator: Bound
    advantage_normalizers: tuple[Bound, ...]
    importance_ratio: Bound
    clip_rule: Bound
    token_weights: tuple[Bound, ...]
    regularizers: tuple[Bound, ...]
    loss_aggregator: Bound
    owner: Owner | None = None

    @torch.no_grad()
    def keep(self, rollout: Rollout, *, states: States | None = None) -> Tensor:
        """Run the sample filters alone, on the raw rewards; no state changes.

        Args:
            rollout: Completions of all processes; what is scored by models may be missing.
            states: The components' states.

        Returns:
            (N,) bool; False for the rows that a filter drops.

        Raises:
            VariantError: A filter failed; the message names it.
        """
        return self._kept(Workspace(rollout.tensors(), states))

    @torch.no_grad()
    def advantages(
        self,
        rollout: Rollout,
        *,
        kl_coef: float | None = None,
        states: States | None = None,
        keep: Tensor | None = None,
    ) -> AdvantageResult:
        """Turn the rewards of one rollout into advantages; they stay as they are until the next rollout.

        Args:
            rollout: The generation batch of all processes.
            kl_coef: The KL coefficient in force; the variant's own when left out.
            states: The components' states.
            keep: (N,) bool; what the filters said when the rows were drawn, where that was in rounds of their own. The
                filters then run for their states alone.

        Returns:
            Advantages, returns, the rows to train on, metrics and new states.

        Raises:
            VariantError: A component failed, or made a value that is not finite; the message names it.
        """
        x = Workspace(rollout.tensors(), states)
        x["kl_coef"] = kl_coef = self.kl_coef(kl_coef)

        kept = self._kept(x)
        x["keep"] = kept if keep is None else keep

        for shaper in self.reward_shapers:
            if not shaper.info.after_kl:
                x.reshape_rewards(shaper)
        if self.kl and self.kl.measured:
            x["kl"] = x.call(self.kl.estimator)
        if self.kl and self.kl.in_reward:
            x.reshape_rewards(self.kl.placement)
        for shaper in self.reward_shapers:
            if shaper.info.after_kl:
                x.reshape_rewards(shaper)

        estimate = x.estimated(self.advantage_estimator, *self.advantage_normalizers)

        x.require_finite()
        if self.kl and self.kl.measured:
            x["measured_kl"], x["measured_sequence_kl"] = metrics.measured_kl(x["kl"], rollout.mask)
        return AdvantageResult(
            advantages=estimate.advantages,
            returns=estimate.returns,
            keep=x["keep"],
            rewards=x["rewards"],
            next_kl_coef=self._next_kl_coef(x, kl_coef),
            metrics=metrics.of_rollout(x, rollout, estimate.returns),
            states=x.states,
        )

    def loss(
        self,
        batch: Batch,
        *,
        kl_coef: float | None = None,
        states: States | None = None,
        gather: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        critic_only: bool = False,
    ) -> LossResult:
        """Compute this micro-batch's share of the loss of its optimizer step.

        Args:
            batch: The micro-batch; gradients flow through its log_probs, entropies and values.
            kl_coef: The KL coefficient in force; the variant's own when left out.
            states: The components' states.
            gather: Concatenates a tensor over all ranks along its first dimension.
            critic_only: Whether the critic alone learns, as while it warms up: the loss is its terms only.

        Returns:
            The loss, metrics and new states.

        Raises:
            VariantError: A component failed, or made a value that is not finite; the message names it.
        """
        x = Workspace({**batch.tensors(), "kl_coef": self.kl_coef(kl_coef), "gather": gather}, states)

        log_ratio = x.call(self.importance_ratio)
        x["log_ratio"] = bounded(log_ratio)
        weights = [weight.detach() for bound in self.token_weights if (weight := x.call(bound)) is not None]
        by_rule = "token_weights" in self.clip_rule.info.inputs
        if weights or by_rule:
            x["token_weights"] = functools.reduce(torch.mul, weights, torch.ones_like(log_ratio[:, :1]))

        clip = x.call(self.clip_rule)
        weighted = clip.loss * x["token_weights"] if weights and not by_rule else clip.loss
        x["per_token_loss"] = weighted.expand_as(batch.log_probs)
        if self.kl and not self.kl.in_reward:
            x["kl"] = x.call(self.kl.estimator)
            x["per_token_loss"] = x.call(self.kl.placement)

        loss: Tensor = x.call(self.loss_aggregator)
        if critic_only:
            loss = torch.zeros_like(loss)
        terms = {term.name: x.call(term) for term in self.regularizers}
        for term in self.regularizers:
            if critic_only and not term.info.needs("values"):
                continue
            share = masked_sum(terms[term.name], batch.mask) / max(batch.totals.tokens, 1)
            loss = loss + term.parameters["coef"] * share

        with torch.no_grad():
            finite = batch.sum_of_all(loss, log_ratio).isfinite()
        if not finite:
            x.require_finite()
            if not loss.isfinite():
                raise VariantError("The loss is not finite, though every component's output is.")
        return LossResult(loss=loss, observed=metrics.observe(x, batch, clip, terms), states=x.states)

    # -- what the parts need ----------------------------------------------------------------------------------------

    def kl_coef(self, kl_coef: float | None = None) -> float:
        """The coefficient given, else the variant's own; 0 without KL."""
        return (self.kl.coef if self.kl else 0.0) if kl_coef is None else kl_coef

    @property
    def components(self) -> Iterator[Bound]:
        """Every component, in the order in which it runs."""
        yield from (*self.sample_filters, *self.reward_shapers)
        if self.kl:
            yield from (self.kl.estimator, self.kl.placement, self.kl.controller)
        yield from (*self.advantage_estimator.with_parts, *self.advantage_normalizers)
        yield from (self.importance_ratio, *self.token_weights)
        yield from (self.clip_rule, self.loss_aggregator, *self.regularizers)

    def needs(self, name: str) -> bool:
        """Whether some component cannot run without the input ``name``."""
        return any(bound.info.needs(name) for bound in self.components)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is scored."""
        return self.needs("ref_log_probs")

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether the policy's log-probs must be known before learning starts."""
        by_estimator = any(bound.info.needs("log_probs") for bound in self.advantage_estimator.with_parts)
        return bool(self.kl and self.kl.measured) or by_estimator

    @property
    def min_generations(self) -> int:
        """Least completions per prompt."""
        return max(bound.min_generations for bound in self.components)

    def check_generations(self, num_generations: int) -> None:
        """Raise a `VariantError` if a component needs more completions per prompt."""
        for bound in self.components:
            if bound.min_generations > num_generations:
                raise VariantError(
                    f"{bound.slot} '{bound.name}' needs at least {bound.min_generations} generations per prompt; "
                    f"num_generations is {num_generations}."
                )

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _kept(self, x: Workspace) -> Tensor:
        keep = torch.ones_like(x["scored"])
        for sample_filter in self.sample_filters:
            keep = keep & x.call(sample_filter).bool()
        return keep

    def _next_kl_coef(self, x: Workspace, kl_coef: float) -> float | None:
        return float(x.call(self.kl.controller)) if self.kl else None
