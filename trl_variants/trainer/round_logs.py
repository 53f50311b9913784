"""What a rollout of several rounds logs: TRL's metrics and its table of completions, over the rows trained on alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from trl_variants.trainer.rows import Rows

__all__ = ["RoundLogs", "rollout_metrics"]

_EXTRA = "extra/"  # columns that reward functions added to the table (`log_extra`)


class RoundLogs:
    """Takes back what TRL logs for each round, and logs the rows that were selected in its place.

    Metrics that belong to no row (those of `log_metric`, of tool calls) become one mean over the rounds; the count of
    tokens seen stays that of everything that was generated.

    Args:
        trainer: The trainer, whose metrics are remembered as they are now, and whose table is emptied.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before = {name: list(values) for name, values in trainer._metrics["train"].items()}
        self._clear()

    def take(self, rows: int) -> Rows:
        """Take the round's texts out of the table.

        Args:
            rows: How many completions the round has, over all processes.

        Returns:
            ``prompt``, ``completion`` and the extra columns: lists of one item per row.
        """
        logs = self._trainer._logs
        columns = {"prompt": logs["prompt"], "completion": logs["completion"]}
        columns |= {_EXTRA + name: values for name, values in logs["extra"].items() if values}
        taken = {name: [*values, *[None] * rows][:rows] for name, values in columns.items()}
        self._clear()
        return taken

    def write(self, rows: Rows, **counts: float) -> None:
        """Log the selected rows.

        Args:
            rows: (n, ...) of all processes, with the columns that `take` returned.
            **counts: What is logged as ``sampling/...``.
        """
        trainer = self._trainer
        metrics, logs = trainer._metrics["train"], trainer._logs
        names = trainer.reward_func_names
        formulas = rollout_metrics(
            rows, trainer.reward_weights, names, {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        )
        for name in list(metrics):
            if name != "num_tokens":
                before = self._before.get(name, [])
                new = [value for value in metrics[name][len(before) :] if not math.isnan(value)]
                mean = [sum(new) / len(new)] if new and name not in formulas else []
                metrics[name] = [*before, *mean]
        metrics["num_tokens"] = [trainer.state.num_input_tokens_seen]
        trainer._log_metrics("train", formulas | {f"sampling/{name}": value for name, value in counts.items()})
        logs["prompt"].extend(rows["prompt"])
        logs["completion"].extend(rows["completion"])
        for index, name in enumerate(names):
            logs["rewards"][name].extend(rows["rewards_per_func"][:, index].tolist())
        for name, column in logs["extra"].items():  # also those that this rollout's rewards did not fill
            column.extend(rows.get(f"{_EXTRA}{name}", [None] * len(rows["prompt"])))

    def _clear(self) -> None:
        logs = self._trainer._logs
        columns = [logs["prompt"], logs["completion"], logs["advantages"]]
        for values in [*columns, *logs["rewards"].values(), *logs["extra"].values()]:
            values.clear()


def rollout_metrics(
    rows: Rows, reward_weights: Tensor, reward_names: list[str], stop_ids: set[int]
) -> dict[str, float]:
    """TRL's metrics of a rollout, by TRL's own formulas.

    Args:
        rows: ``completion_ids`` and ``completion_mask`` (n, T), ``rewards_per_func`` (n, F), and maybe ``tool_mask``.
        reward_weights: (F,).
        reward_names: The F names.
        stop_ids: Tokens that end a completion, and padding.

    Returns:
        Numbers by TRL's names; NaN where nothing counts, and for ``frac_reward_zero_std``, which the recipe says.
    """
    mask = rows["completion_mask"]
    last = rows["completion_ids"].gather(1, (mask.sum(1) - 1).clamp(min=0)[:, None])[:, 0]
    ended = torch.isin(last, torch.tensor(sorted(stop_ids), device=last.device))
    lengths = (mask * rows["tool_mask"] if "tool_mask" in rows else mask).sum(1)
    finished = lengths[ended] if ended.any() else lengths.new_zeros(1)
    out = {"completions/clipped_ratio": (~ended).float().mean().item()}
    for name, values in (("", lengths), ("_terminated", finished)):
        out[f"completions/mean{name}_length"] = values.float().mean().item()
        out[f"completions/min{name}_length"] = values.float().min().item()
        out[f"completions/max{name}_length"] = values.float().max().item()
    rewards_per_func = rows["rewards_per_func"]
    for index, name in enumerate(reward_names):
        out[f"rewards/{name}/mean"] = torch.nanmean(rewards_per_func[:, index]).item()
        out[f"rewards/{name}/std"] = nanstd(rewards_per_func[:, index]).item()
    rewards = (rewards_per_func * reward_weights.to(rewards_per_func.device)).nansum(1)
    rewards[rewards_per_func.isnan().all(1)] = torch.nan
    out |= {"reward": torch.nanmean(rewards).item(), "reward_std": nanstd(rewards).item()}
    return out | {"frac_reward_zero_std": torch.nan}
