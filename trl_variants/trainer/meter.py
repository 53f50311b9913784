"""How long each phase of training takes, and how much of what is computed counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl_variants.trainer.forward import RowForward

__all__ = ["PHASES", "Meter"]

PHASES = ("generation", "scoring", "learning")


class Meter:
    """Wall-clock time and tokens of this process, from one rollout to the next.

    Generation holds the rewards, scoring what is computed without gradient besides. Time of a phase inside another one
    is that of the inner one alone.
    """

    def __init__(self) -> None:
        self._running: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self._since = time.perf_counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._tokens = dict.fromkeys(PHASES, 0)
        self._useful = self._stock = 0

    @contextmanager
    def timing(self, phase: str, mode: str = "train") -> Iterator[None]:
        """Count the time until the context ends as a phase's; an evaluation's is not counted."""
        if mode != "train":
            yield
            return
        self._lap()
        self._running.append(phase)
        try:
            yield
        finally:
            self._lap()
            self._running.pop()

    def _lap(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now - self._since
        self._since = now

    def generated(self, output: dict[str, Any], mode: str) -> None:
        """Count the tokens of a generation batch."""
        if mode == "train":
            self._tokens["generation"] += int(output["completion_mask"].sum())

    def computed(self, layout: RowForward, stock: int) -> None:
        """Count a forward of the running phase.

        Args:
            layout: What was computed.
            stock: Tokens that TRL would have computed for the same rows, at the width of the whole rollout.
        """
        if not self._running:  # the loss of an evaluation
            return
        phase = self._running[-1]
        self._tokens[phase] += layout.tokens
        if phase == "learning":
            self._useful += layout.useful_tokens
            self._stock += stock

    def flush(self) -> dict[str, float]:
        """Numbers to log, and a new start.

        ``speed/padding_share`` of the tokens computed in learning, ``speed/tokens_vs_stock`` as a share of what TRL
        would compute; for each phase its share of the time and its tokens per second.
        """
        self._lap()
        total = sum(self._seconds.values())
        found: dict[str, float] = {}
        if self._tokens["learning"] and self._stock:
            found["speed/padding_share"] = 1 - self._useful / self._tokens["learning"]
            found["speed/tokens_vs_stock"] = self._tokens["learning"] / self._stock
        for phase in PHASES:
            if total:
                found[f"speed/{phase}_time_share"] = self._seconds[phase] / total
            if self._tokens[phase] and self._seconds[phase]:
                found[f"speed/{phase}_tokens_per_second"] = self._tokens[phase] / self._seconds[phase]
        self.reset()
        return found
