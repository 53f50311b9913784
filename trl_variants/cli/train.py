"""`trl-variants check` and `trl-variants train`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trl_variants.cli.output import Plugins
from trl_variants.errors import VariantError

__all__ = ["check", "train"]

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; options given besides win.")] = None,
    plugins: Plugins = None,
) -> None:
    """Train from a YAML file. Takes every option of TRL's GRPO script, and variant, variant_overrides, variant_plugins.

    Several processes: `accelerate launch -m trl_variants train --config FILE.yaml`.
    """
    if config is None and not context.args:
        raise VariantError("No config: give --config FILE.yaml.")
    from trl_variants.trainer.launch import parse, run

    run(parse(_arguments(config, context), plugins=plugins or ()))


def check(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML file with settings; options given besides win.")],
    plugins: Plugins = None,
) -> None:
    """Check a YAML file: everything that can be known before a model is loaded."""
    from rich.console import Console
    from rich.table import Table

    from trl_variants.describe import models
    from trl_variants.registry import load_registry
    from trl_variants.trainer.launch import parse
    from trl_variants.trainer.rewards import written
    from trl_variants.trainer.trl_rewards import add_trl

    job = parse(_arguments(config, context), anywhere=True, plugins=plugins or ())
    training, recipe = job.training, job.training.recipe
    registry = add_trl(load_registry(extra=training.variant_plugins or ()))
    steps, accumulation = training.steps_per_generation, training.gradient_accumulation_steps
    reward_model = any(isinstance(function, str) for function in job.reward_funcs)
    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "variant": ": ".join(filter(None, (recipe.variant.name, recipe.variant.summary))),
        "components": "\n".join(f"{bound.slot}: {bound}" for bound in recipe.components),
        "model": str(job.model.model_name_or_path),
        "dataset": job.script.dataset_name or ", ".join(str(dataset.path) for dataset in job.data.datasets),
        "rewards": "\n".join(map(partial(written, registry=registry), job.reward_names, job.reward_funcs)),
        "rollout": f"{training.generation_batch_size // training.num_generations} prompts x "
        f"{training.num_generations} completions, at most {training.max_completion_length} tokens each",
        "updates": f"{training.num_iterations * steps // accumulation} optimizer step(s) per rollout",
        "resident": ", ".join(
            f"{model.name} ({'trained' if model.trained else 'frozen'})" for model in models(recipe, reward_model)
        ),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"{config} is valid.")
    if training.use_cpu:
        console.print("Checked as for the CPU: use_cpu is set, or this machine has no accelerator.")


def _arguments(config: Path | None, context: typer.Context) -> list[str]:
    return [*(["--config", str(config)] if config else []), *context.args]
