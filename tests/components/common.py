"""What the tests of components share: comparison in float64, and small inputs for hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

#: The same examples on every run: a property that fails once fails again.
checked = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)

#: Multiples of 1/8 between -5 and 5: exact in binary, so that a loop and a reduction differ by rounding only.
numbers = st.integers(-40, 40).map(lambda n: n / 8)


def close(got: Tensor, want: Any, atol: float = 1e-12) -> None:
    """Assert equality in float64, shapes included."""
    want = want if isinstance(want, Tensor) else torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.detach().double(), want.double(), rtol=0, atol=atol, equal_nan=True)


def double(values: Any) -> Tensor:
    """A float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def tables(draw: Callable[..., Any], *names: str, rows: int = 4, width: int = 5) -> dict[str, Any]:
    """A ``mask`` (list of lists of bool) and, for each name, numbers of the same shape."""
    n, t = draw(st.integers(1, rows)), draw(st.integers(1, width))
    shape = st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=n, max_size=n)
    filled = st.lists(st.lists(numbers, min_size=t, max_size=t), min_size=n, max_size=n)
    return {"mask": draw(shape), **{name: draw(filled) for name in names}}


@st.composite
def groups(draw: Callable[..., Any]) -> tuple[list[float], list[bool], list[int]]:
    """Rewards, which rows are scored, and group ids in any order; groups differ in size."""
    n = draw(st.integers(1, 9))
    rewards = draw(st.lists(numbers, min_size=n, max_size=n))
    scored = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=n, max_size=n))
    ids = draw(st.lists(st.sampled_from([7, 3, 11]), min_size=n, max_size=n))
    return rewards, scored, ids
