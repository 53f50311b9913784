"""What the tests of this plugin share: comparison in float64, recipes with the plugin loaded, small groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import trl_variants_baselines
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from trl_variants import Recipe, load_registry, resolve

#: The same examples on every run: a property that fails once fails again.
checked = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
#: Multiples of 1/8: exact in binary, so that a loop and a reduction differ by rounding only.
numbers = st.integers(-16, 16).map(lambda n: n / 8)
REGISTRY = load_registry("none", extra=[trl_variants_baselines.__name__])


def recipe(variant: str, **overrides: Any) -> Recipe:
    """A variant of the plugin, resolved."""
    return resolve(variant, overrides, REGISTRY)


def double(values: Any) -> Tensor:
    """A float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, want: Any, atol: float = 1e-12) -> None:
    """Assert equality in float64, shapes included."""
    want = want if isinstance(want, Tensor) else double(want)
    torch.testing.assert_close(got.detach().double(), want.double(), rtol=0, atol=atol)


def one_group(function: Callable[..., Tensor], rewards: list[float], **parameters: Any) -> Tensor:
    """An estimator on one group, all of it scored."""
    rows = torch.ones(len(rewards), dtype=torch.bool)
    return function(double(rewards), rows, torch.zeros(len(rewards), dtype=torch.long), **parameters)


@st.composite
def groups(draw: Callable[..., Any], values: Any = numbers) -> tuple[list[float], list[bool], list[int]]:
    """Rewards, which rows are scored, and group ids in any order; groups differ in size."""
    n = draw(st.integers(1, 10))
    rewards = draw(st.lists(values, min_size=n, max_size=n))
    scored = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=n, max_size=n))
    ids = draw(st.lists(st.sampled_from([7, 3]), min_size=n, max_size=n))
    return [r if s else 0.0 for r, s in zip(rewards, scored, strict=True)], scored, ids


def mates(ids: list[int], scored: list[bool], i: int) -> list[int]:
    """The scored rows of row i's group, itself among them."""
    return [j for j in range(len(ids)) if ids[j] == ids[i] and scored[j]]
