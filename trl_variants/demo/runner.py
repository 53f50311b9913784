"""One demo run: make model and task, test, train with `VariantTrainer`, test again."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trl_variants.demo.settings import DemoResult, DemoSettings, Evaluation, Reporter
from trl_variants.demo.task import Question, Task
from trl_variants.errors import VariantError
from trl_variants.recipe import Recipe
from trl_variants.registry import load_registry
from trl_variants.resolution import resolve

__all__ = ["run_demo"]

TINY = "tiny"
TINY_TASK = "reverse"


@dataclass(frozen=True)
class _Plan:
    """What suits a kind of model: enough to learn something in the time of a demo."""

    steps: int
    learning_rate: float
    num_generations: int
    batch: int
    bf16: bool
    samples_per_question: int


#: A minute on two cores, and five.
TINY_PLAN = _Plan(steps=200, learning_rate=1e-3, num_generations=8, batch=128, bf16=False, samples_per_question=4)
PRETRAINED_PLAN = _Plan(steps=40, learning_rate=1e-5, num_generations=8, batch=16, bf16=True, samples_per_question=2)


def run_demo(settings: DemoSettings | None = None, reporter: Reporter | None = None) -> DemoResult:
    """Train a small model by RL, and test it on held-out questions before and after.

    Args:
        settings: What to train and how; the tiny model with ``dapo`` when left out.
        reporter: Told how the run goes.

    Returns:
        Accuracies before and after, samples, and what the trainer logged.

    Raises:
        VariantError: A setting is wrong or something that it needs is missing.
    """
    settings, reporter = settings or DemoSettings(), reporter or Reporter()
    begin = time.monotonic()
    recipe = resolve(settings.variant, settings.overrides, load_registry(extra=settings.plugins))
    plan = _plan(settings, recipe)
    _check_task(settings)

    from trl_variants.demo.quiet import no_telemetry, quiet

    no_telemetry()
    reporter.status("Loading libraries")
    from trl_variants import VariantConfig, VariantTrainer

    with quiet(), _folder(settings.output_dir) as folder:
        model, tokenizer, task = _prepare(settings, reporter)
        evaluation = {
            "seed": settings.seed,
            "samples_per_question": plan.samples_per_question,
            "batch_size": max(128, plan.batch) if settings.model == TINY else 32,
            "bf16": plan.bf16,
        }
        config = VariantConfig(
            output_dir=str(folder),
            variant=settings.variant,
            variant_overrides=dict(settings.overrides) or None,
            variant_plugins=list(settings.plugins) or None,
            max_steps=plan.steps,
            learning_rate=plan.learning_rate,
            lr_scheduler_type="constant",
            num_generations=plan.num_generations,
            per_device_train_batch_size=plan.batch,
            max_completion_length=task.max_completion_length,
            seed=settings.seed,
            bf16=plan.bf16,
            use_cpu=_on_cpu(settings),
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = VariantTrainer(
            model=model,
            args=config,
            reward_funcs=_reward(settings, task),
            train_dataset=_dataset(task),
            processing_class=tokenizer,
            callbacks=[_callback(reporter)],
        )
        _remove_printer(trainer)
        reporter.status("Testing the model before training")
        before = evaluate_on(trainer.model, tokenizer, task, evaluation)
        about = {"model": _describe(settings, model), "task": task.about}
        reporter.started(settings, recipe, about, plan.steps)
        training = time.monotonic()
        trainer.train()
        training_seconds = time.monotonic() - training
        reporter.status("Testing the model after training")
        after = evaluate_on(trainer.model, tokenizer, task, evaluation)
        history = tuple(log for log in trainer.state.log_history if "reward" in log)
        result = DemoResult(before, after, history, training_seconds, time.monotonic() - begin)
        if settings.output_dir:
            trainer.save_model(settings.output_dir)
            (folder / "demo.json").write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    reporter.finished(result)
    return result
