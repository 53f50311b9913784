"""``trl-variants demo``: a small model learns by RL in front of your eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trl_variants.errors import VariantError

__all__ = ["demo"]


def demo(
    variant: Annotated[str, typer.Option(help="Any registered variant; `trl-variants list` shows them.")] = "dapo",
    model: Annotated[
        str,
        typer.Option(help="tiny (built on the spot), smollm2 (after `make smollm2`), a local folder, or a hub id."),
    ] = "tiny",
    task: Annotated[
        str | None,
        typer.Option(help="reverse for the tiny model; any reasoning-gym task, such as chain_sum, for the others."),
    ] = None,
    task_config: Annotated[
        str | None, typer.Option(metavar="YAML", help="Settings of the reasoning-gym task, as JSON or YAML.")
    ] = None,
    overrides: Annotated[str | None, typer.Option(metavar="YAML", help="variant_overrides, as JSON or YAML.")] = None,
    plugins: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Load a module or a .py file with components of your own. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; chosen by the model.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Chosen by the model.")] = None,
    num_generations: Annotated[int | None, typer.Option(help="Completions per prompt; chosen by the variant.")] = None,
    max_completion_length: Annotated[int | None, typer.Option(help="In tokens; chosen by the task.")] = None,
    logging_steps: Annotated[int, typer.Option(help="Steps from one printed line to the next.")] = 1,
    output_dir: Annotated[
        Path | None, typer.Option(help="Keep the trained model, variant.json and demo.json here.")
    ] = None,
    reward: Annotated[str, typer.Option(hidden=True, help="task, or noise for the control experiment.")] = "task",
) -> None:
    """Train a small model before your eyes: no network, no GPU, a minute on two cores."""
    from trl_variants.cli.output import mapping
    from trl_variants.demo import DemoSettings, run_demo
    from trl_variants.demo.display import Display

    if reward not in ("task", "noise"):
        raise VariantError(f"--reward must be task or noise, not '{reward}'.")
    settings = DemoSettings(
        variant=variant,
        overrides=mapping(overrides),
        plugins=tuple(plugins or ()),
        model=model,
        task=task,
        task_config=_task_config(task_config),
        seed=seed,
        steps=steps,
        learning_rate=learning_rate,
        num_generations=num_generations,
        max_completion_length=max_completion_length,
        logging_steps=logging_steps,
        output_dir=str(output_dir) if output_dir else None,
        reward="noise" if reward == "noise" else "task",
    )
    display = Display()
    try:
        run_demo(settings, display)
    finally:
        display.close()


def _task_config(text: str | None) -> dict[str, Any]:
    import yaml

    if text is None:
        return {}
    try:
        value = yaml.safe_load(text)  # JSON is YAML
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise VariantError(f"--task-config must be a mapping, such as '{{max_terms: 3}}'; not {text!r}.")
    return value
