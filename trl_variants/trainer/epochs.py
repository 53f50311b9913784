"""The learning phase of a rollout: its mini-batches, epoch by epoch, until the last or until KL stops it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger

from trl_variants.data import Totals
from trl_variants.errors import VariantError
from trl_variants.trainer.batch import step_totals
from trl_variants.trainer.passes import prompt_keys
from trl_variants.trainer.rows import Rows, count, join, own_old_log_probs, take, trim

__all__ = ["LearningPhase"]

logger = get_logger(__name__)


class LearningPhase:
    """One rollout, cut into the micro-batches of its optimizer steps, and how far its updates have come.

    Args:
        trainer: The trainer, whose buffer holds the micro-batches.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._size: int = trainer.args.gradient_accumulation_steps
        self._mini_batches: int = trainer.args.steps_per_generation // self._size
        self._pad_id: int = trainer._tokenizer.pad_token_id
        self._updates = 0
        self._stock_width = 0  # of TRL's micro-batches, all as wide as the rollout's widest row
        self.stopped = False

    def begin(self) -> None:
        """Cut a new rollout into the micro-batches of its optimizer steps, with their totals and old log-probs.

        The first optimizer step needs no old log-probs: the policy has not moved, so the current ones, detached, are
        the old ones, and the ratio is exactly 1 (a scoring pass of another shape would differ in the last bits). Rows
        carried from an earlier rollout bring their own.
        """
        trainer = self._trainer
        first_row = 0
        for batch in trainer._buffered_inputs:  # whatever the cut, a later epoch shuffles the rows in this order
            batch["row"] = torch.arange(first_row, first_row + len(batch["completion_ids"]))
            first_row += len(batch["row"])
        self._stock_width = sum(trainer._buffered_inputs[0][name].shape[1] for name in ("prompt_ids", "completion_ids"))
        if trainer.args.shuffle == "groups":
            whole = self._whole("shuffle: groups")
            self._buffer(whole, _shuffled_groups(whole))
        self._cut()
        first = trainer._step // self._size % self._mini_batches
        for index, batch in enumerate(trainer._buffered_inputs):
            if index // self._size != first:
                old = batch.get("rollout_log_probs")
                if old is None:
                    scored = trainer._passes.score(trainer.model, batch, len(batch["loss_mask"]))["log_probs"]
                    old = own_old_log_probs(batch, scored)
                batch["old_per_token_logps"] = old

    def begin_epoch(self) -> None:
        """Before another epoch over the same rollout: other mini-batches, if the variant wants them."""
        trainer = self._trainer
        if trainer.recipe.variant.reshuffle and self._mini_batches > 1 and not self.stopped:
            whole = self._whole("reshuffle")
            groups = trainer.args.shuffle == "groups"
            self._buffer(whole, _shuffled_groups(whole) if groups else torch.randperm(count(whole)).tolist())
            self._cut()

    def _whole(self, setting: str) -> Rows:
        """The rows of all micro-batches."""
        buffer = self._trainer._buffered_inputs
        if self._trainer._passes.by_trl(buffer[0]):
            raise VariantError(
                f"{setting} goes with neither images, prompt tuning, torch_compile nor positions that depend on the "
                "length of a row (dynamic and longrope) in this release."
            )
        whole = join(buffer, self._pad_id)
        return take(whole, whole["row"].argsort().tolist())

    def _buffer(self, whole: Rows, order: list[int]) -> None:
        """Put rows back into the buffer, cut evenly in an order."""
        parts = self._size * self._mini_batches
        rows = len(order) // parts
        self._trainer._buffered_inputs = [take(whole, order[i * rows : (i + 1) * rows]) for i in range(parts)]

    def _cut(self) -> None:
        """Cut each optimizer step into its micro-batches, and give them its totals."""
        trainer = self._trainer
        buffer = trainer._buffered_inputs
        steps = [buffer[i : i + self._size] for i in range(0, len(buffer), self._size)]
        if not trainer._passes.by_trl(buffer[0]):
            for index, batches in enumerate(steps):
                whole = join(batches, self._pad_id)
                cut = trainer._passes.cut(whole, self._size, trainer.args.per_device_train_batch_size)
                about = {"shared": cut.shared, "stock_width": self._stock_width}
                steps[index] = [{**trim(take(whole, part)), **about} for part in cut.parts]
        for batches, totals in zip(steps, self.totals(steps), strict=True):
            for batch in batches:
                batch["totals"] = totals
        trainer._buffered_inputs = [batch for batches in steps for batch in batches]

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
        if not last:
            return {}
        several = trainer.args.updates_per_rollout > 1
        return trainer.meter.flush() | ({"epochs_run": self._updates / self._mini_batches} if several else {})

    def totals(self, steps: list[list[Rows]]) -> list[Totals]:
        """Counts of each optimizer step over all ranks."""
        return step_totals(steps, self._trainer.max_completion_length, self._trainer.accelerator)


def _shuffled_groups(rows: Rows) -> list[int]:
    """Row numbers with the rows of a prompt side by side, prompts in random order."""
    keys = prompt_keys(rows)
    place = dict(zip(dict.fromkeys(keys), torch.randperm(len(set(keys))).tolist(), strict=True))
    return sorted(range(len(keys)), key=lambda row: place[keys[row]])
