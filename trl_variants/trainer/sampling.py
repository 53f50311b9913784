"""Dynamic sampling: rounds of prompts until a rollout is full of groups that the sample filters keep.

A round is one generation of TRL's, over as many prompts as a rollout holds. What all processes generated is gathered,
judged by the filters, and collected in order; all that decides is equal on all processes. Kept groups beyond a full
rollout are the surplus: scored with the policy that generated them, and first in the next rollout.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast
from torch import Tensor

from trl_variants.trainer.batch import gather_rows
from trl_variants.trainer.compat import VISION_INPUTS
from trl_variants.trainer.prompts import PromptStream
from trl_variants.trainer.rollout import Selection, build_rollout, loss_mask
from trl_variants.trainer.round_logs import RoundLogs
from trl_variants.trainer.rows import Rows, count, gather, join, move, own_old_log_probs, take, trim
from trl_variants.trainer.surplus import IMAGES, Limits, Surplus, plain, select, unsupported

__all__ = ["Resampler"]

logger = get_logger(__name__)

#: Entries of TRL's output that are no rows, or that are made anew.
_NOT_ROWS = ("advantages", "num_items_in_batch")
#: Entries that the learning phase takes from the selected rows.
_LEARNED = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "sampling_per_token_logps",
    "carried",
    "carried_log_probs",
    "greedy_rewards",
)


class Resampler:
    """Draws the rollouts of a run, round by round.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._limits = Limits.of(trainer.args)
        self._start()

    def begin(self) -> None:
        """Start a run: at the first prompt, without surplus."""
        self._start()
        args = self._trainer.args
        logger.log(
            logging.INFO if args.max_steps > 0 else logging.WARNING,
            "sampling: resample draws prompts as it needs them, so num_train_epochs (%g) counts optimizer steps, as "
            "many as would pass over the prompts without resampling.",
            args.num_train_epochs,
        )

    def _start(self) -> None:
        trainer = self._trainer
        args = trainer.args
        self._generations: int = trainer.num_generations
        self._groups: int = args.generation_batch_size // self._generations
        self._prompts = PromptStream(trainer.train_dataset, seed=args.seed, shuffle=trainer.shuffle_dataset)
        self._surplus = Surplus(self._limits.max_carry_age, self._generations)
        self._columns = None
        self._warned = False
        if args.remove_unused_columns:
            trainer._set_signature_columns_if_needed()
            self._columns = set(trainer._signature_columns)
        self._began = self.state()

    # -- a rollout --------------------------------------------------------------------------------------------------

    def rollout(self) -> tuple[Rows, Selection]:
        """Draw a rollout.

        Returns:
            This process's rows as TRL would return them, with ``carried`` (rows,) and ``carried_log_probs`` (rows, T)
            where groups were carried; and what of the rows of all processes is trained on.

        Raises:
            VariantError: The prompts hold images.
        """
        trainer, size = self._trainer, self._generations
        self._began = self.state()
        logs = RoundLogs(trainer)
        kept, dropped = self._surplus.enter()
        carried = sum(map(count, kept)) // size
        spare: list[Rows] = []
        found, rounds, new, tokens = carried, 0, 0, 0
        while found < self._groups and rounds < self._limits.max_rounds:
            rows = self._round(logs)
            good = rows["keep"].view(-1, size).any(1)
            rounds, new, tokens = rounds + 1, new + int(good.sum()), tokens + int(loss_mask(rows).sum())
            found = carried + new
            where = good.repeat_interleave(size)
            kept.append(take(rows, where.nonzero()[:, 0].tolist()))
            if sum(map(count, spare)) < self._groups * size:  # more than that is never used
                spare.append(take(rows, (~where).nonzero()[:, 0].tolist()))
        pad_id = trainer._tokenizer.pad_token_id
        whole = join([*kept, *spare], pad_id)
        trained, surplus, filled = select(found, sum(map(count, spare)) // size, self._groups)
        selected = take(whole, [*range(trained * size), *range(found * size, (found + filled) * size)])
        dropped += self._hold(take(whole, range(trained * size, found * size)))
        if filled:
            logger.log(
                logging.INFO if self._warned else logging.WARNING,
                "max_rounds (%d) reached with %d of %d groups kept by the filters; training on these. Said once; the "
                "log has sampling/trained_groups.",
                rounds,
                trained,
                self._groups,
            )
            self._warned = True
        selection = Selection(selected["keep"].to(trainer.accelerator.device), rows=(trained or self._groups) * size)
        logs.write(
            take(selected, range(selection.rows)),
            rounds=rounds,
            kept_ratio=new / (rounds * self._groups) if rounds else torch.nan,
            generated_tokens=tokens,
            trained_tokens=int((loss_mask(selected) & selected["keep"][:, None]).sum()),
            trained_groups=trained,
            carried_groups=min(carried, trained),
            dropped_groups=dropped,
        )
        trainer._rewards_per_func = selected["rewards_per_func"].to(trainer.accelerator.device)
        return self._own(selected), selection

    def _round(self, logs: RoundLogs) -> Rows:
        """Generate and judge one round; the rows of all processes, in order, in the computer's memory."""
        trainer = self._trainer
        accelerator = trainer.accelerator
        output = trainer._generate_round(self._inputs())
        if any(name in output for name in (*VISION_INPUTS, "num_images")):
            raise unsupported("images")
        rollout = build_rollout(trainer, output, self._generations)
        keep = trainer.recipe.keep(rollout, states=trainer._states)
        if accelerator.num_processes > 1:  # a filter may round or draw otherwise on another process
            keep = broadcast(keep.long()).bool()
        tensors = {name: value for name, value in output.items() if name not in _NOT_ROWS}
        rows = gather(tensors, accelerator, trainer._tokenizer.pad_token_id)
        rows |= {"rewards_per_func": trainer._rewards_per_func, "keep": keep}
        return move(rows, "cpu") | logs.take(len(keep))

    def _inputs(self) -> list[dict[str, Any]]:
        """This process's share of the next prompts, each as often as it has completions, laid out as TRL does."""
        accelerator = self._trainer.accelerator
        prompts = self._prompts.take(self._groups)
        rows = len(prompts) * self._generations // accelerator.num_processes
        first = accelerator.process_index * rows
        # A copy each: TRL and reward functions write into them.
        inputs = [copy.deepcopy(prompts[i // self._generations]) for i in range(first, first + rows)]
        if any(name in row for row in inputs for name in IMAGES):
            raise unsupported("images")
        if self._columns is not None:
            inputs = [{name: value for name, value in row.items() if name in self._columns} for row in inputs]
        return inputs

    def _hold(self, rows: Rows) -> int:
        """Keep the surplus for the next rollout, scored by the policy of now."""
        if count(rows) and self._limits.max_carry_age:
            rows = trim(rows, self._trainer.pad_to_multiple_of)
            scored = own_old_log_probs(rows, self._log_probs(rows))
            kept = {"carried": torch.ones(count(rows), dtype=torch.bool), "carried_log_probs": scored}
            rows = {"age": torch.zeros(count(rows), dtype=torch.long)} | rows | kept
        return self._surplus.hold(rows)

    def _log_probs(self, rows: Rows) -> Tensor:
        """(rows, T) of the policy, each process scoring as many rows."""
        trainer, total = self._trainer, count(rows)
        accelerator = trainer.accelerator
        share = -(-total // accelerator.num_processes)
        first = accelerator.process_index * share
        given = {name: rows[name] for name in _LEARNED[:5] if name in rows}
        mine = move(take(given, [min(first + i, total - 1) for i in range(share)]), accelerator.device)
        mine["loss_mask"] = loss_mask(mine)
        with trainer.meter.timing("scoring"):
            scored = trainer._passes.score(trainer.model, mine, trainer.args.per_device_train_batch_size)["log_probs"]
        whole: Tensor = gather_rows(scored, accelerator)
        return whole[:total].cpu()

    def _own(self, selected: Rows) -> Rows:
        """This process's equal share of the selected rows."""
        accelerator = self._trainer.accelerator
        rows = count(selected) // accelerator.num_processes
        first = accelerator.process_index * rows
        names = [name for name in _LEARNED if name in selected]
        if not bool(selected.get("carried", torch.zeros(1)).any()):
            names = [name for name in names if not name.startswith("carried")]
        mine = take({name: selected[name] for name in names}, range(first, first + rows))
        return move(trim(mine, self._trainer.pad_to_multiple_of), accelerator.device)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The stream's position and the surplus, in tensors, numbers, strings, lists and dicts."""
        rows = self._surplus.rows
        return {
            "prompts": self._prompts.state(),
            "generations": self._generations,
            "reward_names": list(self._trainer.reward_func_names),
            "surplus": None if rows is None else {name: plain(value) for name, value in rows.items()},
        }

    def saved(self, *, midway: bool) -> dict[str, Any]:
        """What a checkpoint holds.

        Args:
            midway: Whether the rollout has updates left: a resumed run draws it anew, from where it began.
        """
        return self._began if midway else self.state()

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state that was saved; a surplus of other groups or rewards is dropped, with a warning."""
        self._prompts.load(state["prompts"])
        own = (self._generations, list(self._trainer.reward_func_names))
        if state["surplus"] is not None:
            if (state["generations"], state["reward_names"]) == own:
                self._surplus.rows = dict(state["surplus"])
            else:
                logger.warning(
                    "The checkpoint carries groups of %d completions scored by %s, and this run has %d, scored by %s; "
                    "they are dropped.",
                    state["generations"],
                    ", ".join(state["reward_names"]),
                    own[0],
                    ", ".join(own[1]),
                )
        self._began = self.state()
