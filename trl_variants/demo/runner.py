"""One demo run: make model and task, test, train with `VariantTrainer`, test again."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trl_variants.demo.evaluation import evaluate
from trl_variants.demo.settings import DemoResult, DemoSettings, Reporter
from trl_variants.demo.task import Task
from trl_variants.errors import VariantError
from trl_variants.recipe import Recipe
from trl_variants.registry import load_registry
from trl_variants.resolution import resolve

__all__ = ["run_demo"]

TINY = "tiny"
TINY_TASK = "reverse"
DEFAULT_TASK = "chain_sum"


@dataclass(frozen=True)
class _Plan:
    """What suits a kind of model: enough to learn something in the time of a demo."""

    steps: int
    learning_rate: float
    num_generations: int
    batch: int
    cpu: bool
    bf16: bool
    samples_per_question: int
    max_rounds: int | None = 3  # of a variant that resamples: once the task is learned, every rollout takes them all


#: A minute on two cores; a model this small is faster there than on a GPU, and the same everywhere.
TINY_PLAN = _Plan(
    steps=300,
    learning_rate=1.5e-3,
    num_generations=8,
    batch=128,
    cpu=True,
    bf16=False,
    samples_per_question=4,
)
#: Four minutes on two cores.
PRETRAINED_PLAN = _Plan(
    steps=12,
    learning_rate=2e-5,
    num_generations=8,
    batch=16,
    cpu=False,
    bf16=True,
    samples_per_question=1,
)


def run_demo(settings: DemoSettings | None = None, reporter: Reporter | None = None) -> DemoResult:
    """Train a small model by RL, and test it on held-out questions before and after.

    Args:
        settings: What to train and how; the tiny model with ``dapo`` when left out.
        reporter: Told how the run goes.

    Returns:
        Accuracies before and after, samples, and what the trainer logged.

    Raises:
        VariantError: A setting is wrong, or something that it needs is missing.
    """
    settings, reporter = settings or DemoSettings(), reporter or Reporter()
    begin = time.monotonic()
    recipe = resolve(settings.variant, settings.overrides, load_registry(extra=settings.plugins))
    plan = _plan(settings, recipe)
    _check_task(settings)

    reporter.status("Loading libraries")
    from trl_variants.demo.quiet import no_telemetry, quiet

    no_telemetry()
    with quiet(), _folder(settings.output_dir) as folder:
        model, tokenizer, task = _prepare(settings, reporter)
        test = partial(
            evaluate,
            model,
            tokenizer,
            task,
            seed=settings.seed,
            samples_per_question=plan.samples_per_question,
            batch_size=128 if settings.model == TINY else 32,
            bf16=plan.bf16,
        )
        trainer = _trainer(settings, plan, folder, model, tokenizer, task, reporter)
        reporter.status("Testing the model before training")
        before = test()
        about = {"model": _about_model(settings, model), "task": task.about}
        reporter.started(settings, recipe, about, plan.steps)
        training = time.monotonic()
        trainer.train()
        training_seconds = time.monotonic() - training
        reporter.status("Testing the model after training")
        after = test()
        history = tuple(log for log in trainer.state.log_history if "loss" in log)
        if settings.output_dir:
            trainer.save_model(settings.output_dir)
        result = DemoResult(before, after, history, training_seconds, time.monotonic() - begin)
        if settings.output_dir:
            (folder / "demo.json").write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    reporter.finished(result)
    return result


def _plan(settings: DemoSettings, recipe: Recipe) -> _Plan:
    """The plan for the kind of model, with what the settings say in its place, on the hardware that there is."""
    import torch

    from trl_variants.demo.models import has_bf16

    plan = TINY_PLAN if settings.model == TINY else PRETRAINED_PLAN
    variant = recipe.variant
    # A critic compares a completion with what it expected: more prompts teach more than more completions of one.
    proposed = variant.num_generations or (1 if variant.critic else plan.num_generations)
    generations = settings.num_generations or proposed
    recipe.check_generations(generations)
    # With several epochs over each, half as many rollouts do, in smaller steps.
    epochs = variant.num_iterations or 1
    steps = int(plan.steps * max(1, epochs / 2)) if settings.steps is None else settings.steps
    rate = plan.learning_rate * (2 / 3 if epochs > 1 else 1)
    for name, value in (("steps", steps), ("logging_steps", settings.logging_steps)):
        if value < 1:
            raise VariantError(f"{name} must be at least 1, not {value}.")
    cpu = plan.cpu or not torch.cuda.is_available()
    return replace(
        plan,
        steps=steps,
        learning_rate=rate if settings.learning_rate is None else settings.learning_rate,
        num_generations=generations,
        batch=max(1, round(plan.batch / generations)) * generations,  # whole groups
        cpu=cpu,
        bf16=plan.bf16 and has_bf16(cpu),
        max_rounds=plan.max_rounds if variant.sampling == "resample" else None,
    )


def _check_task(settings: DemoSettings) -> None:
    """The tiny model knows nine characters, and no other model has been warmed up on reversing."""
    if settings.model == TINY and settings.task not in (None, TINY_TASK):
        raise VariantError(
            f"The tiny model knows only the task {TINY_TASK}. For '{settings.task}' give --model smollm2, a local "
            "folder or the id of a model on the hub."
        )
    if settings.model != TINY and settings.task == TINY_TASK:
        raise VariantError(
            f"The task {TINY_TASK} belongs to the tiny model. Leave --model out, or choose another task."
        )
    if settings.model == TINY and settings.task_config:
        raise VariantError(f"The task {TINY_TASK} has no settings; task_config is for the tasks of reasoning-gym.")
    if settings.reward not in ("task", "noise"):
        raise VariantError(f"reward must be 'task' or 'noise', not {settings.reward!r}.")


@contextmanager
def _folder(output_dir: str | None) -> Iterator[Path]:
    """The output folder, or a temporary one that is gone afterwards."""
    if output_dir:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        yield Path(output_dir)
    else:
        with tempfile.TemporaryDirectory(prefix="trl-variants-demo-") as folder:
            yield Path(folder)


def _prepare(settings: DemoSettings, reporter: Reporter) -> tuple[Any, Any, Task]:
    """Model, tokenizer and task."""
    if settings.model == TINY:
        from trl_variants.demo import reverse

        reporter.status("Building the tiny model and warming it up")
        task = reverse.make_task(settings.seed, settings.max_completion_length)
        tokenizer = reverse.make_tokenizer()
        model = reverse.make_model(tokenizer, settings.seed)
        reverse.warm_up(model, tokenizer, task, settings.seed)
        return model, tokenizer, task
    from trl_variants.demo import gym, models

    models.find_gguf(settings.model)  # a missing model is known at once, a missing task a little later
    reporter.status("Making the questions")
    name = settings.task or DEFAULT_TASK
    make_task = partial(
        gym.make_task,
        name,
        seed=settings.seed,
        config=settings.task_config,
        max_length=settings.max_completion_length,
    )
    task = make_task()
    reporter.status(f"Loading {settings.model}")
    model, tokenizer = models.load_pretrained(settings.model)
    return model, tokenizer, task if tokenizer.chat_template else make_task(chat=False)


def _trainer(
    settings: DemoSettings, plan: _Plan, folder: Path, model: Any, tokenizer: Any, task: Task, reporter: Reporter
) -> Any:
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback

    from trl_variants import VariantConfig, VariantTrainer

    rows = [{"prompt": question.prompt, "question": index} for index, question in enumerate(task.train)]
    trainer = VariantTrainer(
        model=model,
        args=VariantConfig(
            output_dir=str(folder),
            variant=settings.variant,
            variant_overrides=dict(settings.overrides) or None,
            variant_plugins=list(settings.plugins) or None,
            max_steps=plan.steps,
            learning_rate=plan.learning_rate,
            # Adam's first steps are as long as the later ones, however small the gradient; they would undo much.
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=plan.steps // 10,
            num_generations=plan.num_generations,
            max_rounds=plan.max_rounds,
            per_device_train_batch_size=plan.batch,
            max_completion_length=task.max_completion_length,
            seed=settings.seed,
            bf16=plan.bf16,
            use_cpu=plan.cpu,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        ),
        reward_funcs=_noise(settings.seed) if settings.reward == "noise" else _reward(task),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[_callback(reporter)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _reward(task: Task) -> Callable[..., list[float]]:
    """The task's score, in the form of a TRL reward function."""

    def task_score(completions: list[Any], question: list[int], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [task.score(task.train[index], text) for index, text in zip(question, texts, strict=True)]

    return task_score


def _noise(seed: int) -> Callable[..., list[float]]:
    """A coin toss for each completion: what is learned from it is not the task."""
    coin = random.Random(seed)

    def noise(completions: list[Any], **_: Any) -> list[float]:
        return [float(coin.random() < 0.5) for _ in completions]

    return noise


def _callback(reporter: Reporter) -> Any:
    from transformers import TrainerCallback

    class Report(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:
                reporter.step(state.global_step, logs)

    return Report()


def _about_model(settings: DemoSettings, model: Any) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    size = f"{count / 1e6:.0f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"
    return f"{settings.model} ({type(model).__name__}, {size} parameters)"
