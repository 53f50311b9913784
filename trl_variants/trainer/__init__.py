"""The trainer: TRL's loop, generation, rewards and logging, with the objective of a recipe.

The only package here that imports trl. What it uses of TRL's private names is listed and checked in ``compat.py``.
"""
