"""What a demo run is told, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trl_variants.recipe import Recipe
from trl_variants.variant import Variant

__all__ = ["DemoResult", "DemoSettings", "Evaluation", "Reporter", "Sample"]


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What to train, on what, and how long. What is None is chosen to suit the model.

    Attributes:
        variant: Name of a registered variant, or a `Variant`.
        overrides: By slot, as ``variant_overrides`` in a config.
        plugins: Modules or ``.py`` files with components and variants of one's own.
        model: ``tiny`` (built on the spot), ``smollm2`` (the folder ``./smollm2``), any local folder or hub id.
        task: ``reverse`` for the tiny model, a reasoning-gym task for any other.
        task_config: Settings of the reasoning-gym task, over its own defaults.
        seed: Decides the split, the tiny model's weights, every sample; the same seed gives the same run.
        steps: Optimizer steps.
        learning_rate: Reached over the first tenth of the steps, constant from there on.
        num_generations: Completions per prompt.
        max_completion_length: Tokens of a completion.
        logging_steps: Steps from one printed line to the next; each shows the mean since the line before.
        output_dir: Where the trained model, ``variant.json`` and ``demo.json`` are kept; nothing is kept without it.
        reward: ``task``, or ``noise`` for the control experiment: a coin toss, from which nothing can be learned.
    """

    variant: str | Variant = "dapo"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    plugins: Sequence[str] = ()
    model: str = "tiny"
    task: str | None = None
    task_config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    steps: int | None = None
    learning_rate: float | None = None
    num_generations: int | None = None
    max_completion_length: int | None = None
    logging_steps: int = 1
    output_dir: str | None = None
    reward: Literal["task", "noise"] = "task"


@dataclass(frozen=True)
class Sample:
    """One held-out question with the model's answer, sampled at temperature 1."""

    question: str
    expected: str
    completion: str
    right: bool


@dataclass(frozen=True)
class Evaluation:
    """How the model does on the held-out questions.

    Attributes:
        sampled: Share of completions with the full score, sampled at temperature 1.
        greedy: The same for the most likely completion of each question.
        samples: A few of the sampled completions, the same questions before and after training.
    """

    sampled: float
    greedy: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class DemoResult:
    """What came out of a run.

    Attributes:
        before: The model before RL, after the tiny model's warm-up.
        after: The model after RL.
        history: What the trainer logged, one mapping a step.
        training_seconds: Wall-clock time of the RL steps alone.
        seconds: Wall-clock time of the whole run.
    """

    before: Evaluation
    after: Evaluation
    history: tuple[Mapping[str, float], ...]
    training_seconds: float
    seconds: float


class Reporter:
    """Told how a run goes. This one says nothing."""

    def status(self, message: str) -> None:
        """Something slow begins."""

    def started(self, settings: DemoSettings, recipe: Recipe, about: Mapping[str, str], steps: int) -> None:
        """Training is about to begin; ``about`` describes model and task in a few words."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One optimizer step is done; ``metrics`` are TRL's."""

    def finished(self, result: DemoResult) -> None:
        """The trained model has been evaluated."""
