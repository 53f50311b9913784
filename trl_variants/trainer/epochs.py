"""The learning phase of a rollout: its mini-batches, epoch by epoch, until the last or until KL stops it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl.trainer import grpo_trainer

from trl_variants.data import Totals
from trl_variants.trainer.batch import step_totals
from trl_variants.trainer.rows import own_old_log_probs

__all__ = ["LearningPhase"]

logger = get_logger(__name__)

MicroBatch = dict[str, Any]


class LearningPhase:
    """One rollout, cut into the micro-batches of its optimizer steps, and how far its updates have come.

    Args:
        trainer: The trainer, whose buffer holds the micro-batches.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._size: int = trainer.args.gradient_accumulation_steps
        self._mini_batches: int = trainer.args.steps_per_generation // self._size
        self._updates = 0
        self.stopped = False

    def begin(self) -> None:
        """Give every micro-batch of a new rollout the totals of its optimizer step, and old log-probs.

        The first optimizer step needs none: the policy has not moved, so the current log-probs, detached, are the old
        ones, and the ratio is exactly 1 (a scoring pass of another shape would differ in the last bits). Rows carried
        from an earlier rollout bring their own.
        """
        trainer = self._trainer
        steps = self._count()
        first = trainer._step // self._size % len(steps)
        for index, batches in enumerate(steps):
            for batch in batches:
                if index != first:
                    batch["old_per_token_logps"] = batch.get("rollout_log_probs")
                    if batch["old_per_token_logps"] is None:
                        scored = trainer._score(trainer.model, batch, len(batch["loss_mask"]))
                        batch["old_per_token_logps"] = own_old_log_probs(batch, scored)

    def begin_epoch(self) -> None:
        """Before another epoch over the same rollout: other mini-batches, if the variant wants them."""
        trainer = self._trainer
        if trainer.recipe.variant.reshuffle and self._mini_batches > 1 and not self.stopped:
            trainer._buffered_inputs = _reshuffled(trainer._buffered_inputs)
            self._count()

    def end_step(self, approx_kl: float | None) -> dict[str, float]:
        """Count an optimizer step, and stop the rest where KL(old policy, policy) passes ``target_kl``.

        Args:
            approx_kl: The estimate of the step's forward, a mean over its tokens on all ranks, so that all ranks stop
                at the same boundary; None for a step that did not run.

        Returns:
            Numbers to log.
        """
        trainer, target = self._trainer, self._trainer.args.target_kl
        if approx_kl is not None:
            self._updates += 1
            if target is not None and approx_kl > target:
                self.stopped = True
                logger.info(
                    "approx_kl %.4g is above target_kl %.4g: no more updates on this rollout", approx_kl, target
                )
        last = (trainer._step + 1) % (self._size * self._mini_batches * trainer.num_iterations) == 0
        return {"epochs_run": self._updates / self._mini_batches} if last and trainer.num_iterations > 1 else {}

    def totals(self, steps: list[list[MicroBatch]]) -> list[Totals]:
        """Counts of each optimizer step over all ranks."""
        return step_totals(steps, self._trainer.max_completion_length, self._trainer.accelerator)

    def _count(self) -> list[list[MicroBatch]]:
        """The buffered micro-batches by optimizer step, each with the totals of its step."""
        buffer = self._trainer._buffered_inputs
        steps = [buffer[i : i + self._size] for i in range(0, len(buffer), self._size)]
        for batches, totals in zip(steps, self.totals(steps), strict=True):
            for batch in batches:
                batch["totals"] = totals
        return steps


def _reshuffled(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The rows of all micro-batches in a new order, cut into as many, by TRL's own functions."""
    whole = {name: _joined([batch[name] for batch in batches]) for name in batches[0] if name != "totals"}
    whole = grpo_trainer.shuffle_sequence_dict(grpo_trainer.split_pixel_values_by_grid(whole))
    parts = grpo_trainer.split_tensor_dict(whole, len(batches))
    return [grpo_trainer.unsplit_pixel_values_by_grid(part) for part in parts]


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values) if first.dim() else first
    return [item for value in values for item in value] if isinstance(first, list) else first
