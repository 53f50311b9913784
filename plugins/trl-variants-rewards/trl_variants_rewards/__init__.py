"""Rewards of other libraries by name: `math_verify` for answers of mathematics, `reasoning_gym` for its tasks.

Each takes TRL's signature and both kinds of completions, text and conversations, and imports its library when it is
called. What a function needs stands in its attribute ``requires``, so that a run without it ends before a model loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl_variants import hookimpl
from trl_variants_rewards.gym import reasoning_gym
from trl_variants_rewards.mathematics import math_verify

__all__ = ["math_verify", "reasoning_gym"]
__version__ = "0.1.0"


@hookimpl
def register_reward_functions() -> list[Callable[..., Any]]:
    return [math_verify, reasoning_gym]
