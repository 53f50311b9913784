"""What a demo run looks like in a terminal: a header, a progress bar, a line a step, before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from trl_variants.demo.settings import DemoResult, DemoSettings, Evaluation, Reporter
from trl_variants.describe import formula_text
from trl_variants.recipe import Recipe

__all__ = ["Display"]

#: Column, TRL's name of the metric, and how it is written.
COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("KL", "kl", "{:.4f}"),
    ("length", "completions/mean_length", "{:.1f}"),
    ("clipped", "clip_ratio/region_mean", "{:.1%}"),
    ("entropy", "entropy", "{:.3f}"),
)
#: One more: how much the comparison teaches, within a prompt's group (of those trained on, or drawn) or with a critic.
GROUP_COLUMN = ("no signal", "frac_reward_zero_std", "{:.0%}")
RESAMPLED_COLUMN = ("signal", "sampling/kept_ratio", "{:.0%}")
CRITIC_COLUMN = ("explained", "explained_variance", "{:.2f}")
ABSENT = "—"
WIDTH = 9


class Display(Reporter):
    """Prints a run as it goes."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False, emoji=False)
        self._status: Status | None = None
        self._progress: Progress | None = None
        self._every = 1
        self._pending: list[Mapping[str, Any]] = []

    def status(self, message: str) -> None:
        """Show what is going on, until something else is shown; on a terminal only."""
        self.close()
        if self._console.is_terminal:
            self._status = self._console.status(f"{message} ...")
            self._status.start()

    def started(self, settings: DemoSettings, recipe: Recipe, about: Mapping[str, str], steps: int) -> None:
        """Print the header, and start the progress bar."""
        self.close()
        header = Table.grid(padding=(0, 2, 0, 0))
        header.add_column(style="dim")
        header.add_column(overflow="fold")
        variant = Text.assemble((recipe.variant.name, "bold"), f"  {recipe.variant.summary or ''}")
        rows: dict[str, str | Text] = {
            "model": about["model"],
            "task": about["task"],
            "variant": variant,
            "loss": formula_text(recipe)[0],
        }
        if settings.reward == "noise":
            rows["reward"] = "a coin toss: nothing can be learned"
        for name, value in rows.items():
            header.add_row(name, value)
        self._console.print(header)
        self._console.print()
        last = RESAMPLED_COLUMN if recipe.variant.sampling == "resample" else GROUP_COLUMN
        self._columns = (*COLUMNS, CRITIC_COLUMN if recipe.variant.critic else last)
        titles = "".join(f"{title:>{WIDTH + 1}}" for title, _, _ in self._columns)
        self._console.print(Text(f"{'step':>5}{titles}", style="bold"))
        self._every = settings.logging_steps
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.add_task("training", total=steps)
            self._progress.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar, and print a line: the mean over the steps since the line before."""
        self._pending.append(metrics)
        if self._progress:
            self._progress.update(self._progress.task_ids[0], completed=step)
        if step % self._every == 0 or step == 1:
            cells = "".join(f"{self._mean(name, form):>{WIDTH + 1}}" for _, name, form in self._columns)
            self._console.print(f"{step:>5}{cells}")
            self._pending.clear()

    def finished(self, result: DemoResult) -> None:
        """Print accuracies and samples, before and after."""
        self.close()
        before, after = result.before, result.after
        accuracy = Table()
        for title in ("", "before", "after"):
            accuracy.add_column(title, justify="right" if title else "left")
        accuracy.add_row("sampled", f"{before.sampled:.1%}", Text(f"{after.sampled:.1%}", style="bold"))
        accuracy.add_row("greedy", f"{before.greedy:.1%}", Text(f"{after.greedy:.1%}", style="bold"))
        # Titles of their own: a table's title is folded to the table's width.
        self._console.print("\nExact answers on held-out questions", style="bold")
        self._console.print(accuracy)
        self._console.print("\nSampled completions", style="bold")
        self._console.print(_samples(before, after))
        self._console.print(f"{result.training_seconds:.0f} s of training, {result.seconds:.0f} s in all.")

    def close(self) -> None:
        """Take away what moves; needed when a run ends early."""
        if self._status:
            self._status.stop()
        if self._progress:
            self._progress.stop()
        self._status = self._progress = None

    def _mean(self, name: str, form: str) -> str:
        values = [log[name] for log in self._pending if log.get(name) is not None]
        finite = [value for value in values if math.isfinite(value)]
        return form.format(sum(finite) / len(finite)) if finite else ABSENT


def _samples(before: Evaluation, after: Evaluation) -> Table:
    table = Table()
    for title in ("question", "expected", "before", "after"):
        table.add_column(title, overflow="fold")
    for old, new in zip(before.samples, after.samples, strict=True):
        table.add_row(old.question, old.expected, *(_answer(s.completion, s.right) for s in (old, new)))
    return table


def _answer(completion: str, right: bool) -> Text:
    return Text.assemble(("✓ ", "green") if right else ("✗ ", "red"), completion.strip() or "(nothing)")
