"""The trainer: TRL's loop, generation, rewards and logging, with the objective of a recipe.

The only package here that imports trl. What it uses of TRL's private names is listed and checked in ``compat.py``.
"""

# First of all, so that another version of TRL is told by name and not by the first import that fails.
import trl_variants.trainer.compat  # noqa: F401
