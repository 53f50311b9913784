"""What a checkpoint holds besides TRL's: the KL coefficient, the components' states, the critic."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.logging import get_logger

from trl_variants.describe import recipe_dict

__all__ = ["load_state", "save_state"]

logger = get_logger(__name__)

_FILE = "variant_state.pt"


def save_state(trainer: Any, checkpoint: str) -> None:
    """Write the trainer's state into a checkpoint that TRL has written."""
    state = {
        "kl_coef": trainer._next_kl_coef,
        "states": trainer._states,
        "recipe": str(recipe_dict(trainer.recipe)),
    }
    torch.save(state, os.path.join(checkpoint, _FILE))
    if trainer.critic:
        trainer.critic.save(checkpoint, optimizer=not trainer.args.save_only_model)


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
    if state["recipe"] != str(recipe_dict(trainer.recipe)):
        logger.warning(
            "%s was written by another variant, or by other versions; this run goes on with '%s'. Compare the "
            "variant.json of both.",
            checkpoint,
            trainer.recipe.variant.name,
        )
