"""What a run writes besides TRL's files: its recipe; in a checkpoint the KL coefficient, states, prompts, critic."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from accelerate.logging import get_logger

from trl_variants.describe import plain, recipe_dict
from trl_variants.trainer.rewards import origins

__all__ = ["load_state", "save_state", "write_recipe"]

logger = get_logger(__name__)

_FILE = "variant_state.pt"


def write_recipe(trainer: Any) -> None:
    """Log the resolved recipe, and write it as ``variant.json`` into the output folder."""
    resolved = recipe_dict(trainer.recipe) | {"rewards": origins(trainer), "run": plain(trainer.run_settings)}
    if trainer.args.should_save:
        os.makedirs(trainer.args.output_dir, exist_ok=True)
        with open(os.path.join(trainer.args.output_dir, "variant.json"), "w") as file:
            json.dump(resolved, file, indent=2)
    logger.info("variant %s: %s", trainer.recipe.variant.name, json.dumps(resolved))


def save_state(trainer: Any, checkpoint: str) -> None:
    """Write the trainer's state into a checkpoint that TRL has written; every rank must call it."""
    if trainer.critic:
        trainer.critic.save(checkpoint, optimizer=not trainer.args.save_only_model)
    if not trainer.args.should_save:
        return
    state = {
        "kl_coef": trainer._next_kl_coef,
        "states": trainer._states,
        "recipe": str(recipe_dict(trainer.recipe)),
    }
    if trainer.resampler:
        period = trainer.args.steps_per_generation * trainer.num_iterations
        midway = trainer.state.global_step * trainer.args.gradient_accumulation_steps % period != 0
        state["sampling"] = trainer.resampler.saved(midway=midway)
    os.makedirs(checkpoint, exist_ok=True)  # with sharded state dicts, accelerate writes the policy later
    torch.save(state, os.path.join(checkpoint, _FILE))


def load_state(trainer: Any, checkpoint: str) -> None:
    """Go on from a checkpoint; warn where it was written by another variant."""
    if trainer.critic:
        trainer.critic.load(checkpoint)
    path = os.path.join(checkpoint, _FILE)
    if not os.path.exists(path):
        return
    state = torch.load(path, map_location="cpu", weights_only=True)
    trainer.kl_coef = trainer._next_kl_coef = state["kl_coef"]
    trainer._states = state["states"]
    if trainer.resampler and "sampling" in state:
        trainer.resampler.load(state["sampling"])
    if state["recipe"] != str(recipe_dict(trainer.recipe)):
        logger.warning(
            "%s was written by another variant, or by other versions; this run goes on with '%s'. Compare the "
            "variant.json of both.",
            checkpoint,
            trainer.recipe.variant.name,
        )
