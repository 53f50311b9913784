"""The cut: optimal where it can be checked by trying everything, within its bound, and no row lost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.components.common import checked
from trl_variants.trainer import microbatches
from trl_variants.trainer.microbatches import best_cut, plain_cut, shared_cut


def partitions(rows: list[int], parts: int) -> Iterator[list[list[int]]]:
    """Every way to put rows into exactly ``parts`` micro-batches, none of them empty."""
    if parts == 1:
        yield [rows]
        return
    first, rest = rows[0], rows[1:]
    for size in range(len(rows) - parts + 1):
        for others in combinations(rest, size):
            left = [row for row in rest if row not in others]
            for tail in partitions(left, parts - 1):
                yield [[first, *others], *tail]


@st.composite
def steps(draw: Any) -> dict[str, Any]:
    """Rows of an optimizer step: as many in each micro-batch as there would be without a cut."""
    parts, size = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    rows = parts * size
    keys = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    prompt_of = draw(st.lists(st.integers(1, 6), min_size=3, max_size=3))
    return {
        "parts": parts,
        "size": size,
        "keys": keys,
        "prompts": [prompt_of[key] for key in keys],
        "completions": draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)),
    }


def bound(step: dict[str, Any]) -> int:
    longest = max(p + c for p, c in zip(step["prompts"], step["completions"], strict=True))
    return step["size"] * longest


def plain_tokens(step: dict[str, Any], part: Any) -> int:
    return len(part) * max(step["prompts"][row] + step["completions"][row] for row in part)


def memory(step: dict[str, Any], part: Any) -> float:
    """A cached token of a prompt takes an eighth of a computed one's memory, for each row."""
    return shared_tokens(step, part) + len(part) * max(step["prompts"][row] for row in part) / 8


def shared_tokens(step: dict[str, Any], part: Any) -> int:
    prompts = len({step["keys"][row] for row in part}) * max(step["prompts"][row] for row in part)
    return prompts + len(part) * max(step["completions"][row] for row in part)


@checked
@given(steps())
def test_the_plain_cut_is_the_best_of_all(step: dict[str, Any]) -> None:
    cut = plain_cut(step["prompts"], step["completions"], step["parts"], largest=bound(step))
    rows = list(range(len(step["keys"])))
    assert sorted(row for part in cut.parts for row in part) == rows
    assert len(cut.parts) == step["parts"] and all(cut.parts)
    sizes = [plain_tokens(step, part) for part in cut.parts]
    assert cut.tokens == sum(sizes) and max(sizes) <= bound(step)
    best = min(
        sum(plain_tokens(step, part) for part in parts)
        for parts in partitions(rows, step["parts"])
        if all(plain_tokens(step, part) <= bound(step) for part in parts)
    )
    assert cut.tokens == best


@checked
@given(steps())
def test_the_shared_cut_is_the_best_of_its_order(step: dict[str, Any]) -> None:
    # Its order: groups by their longest completion, rows of a group by their length.
    rows = range(len(step["keys"]))
    longest = {key: max(step["completions"][r] for r in rows if step["keys"][r] == key) for key in step["keys"]}
    order = sorted(rows, key=lambda r: (longest[step["keys"][r]], step["keys"][r], step["completions"][r]))
    cuts = []
    for edges in combinations(range(1, len(order)), step["parts"] - 1):
        ends = [0, *edges, len(order)]
        parts = [order[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
        if all(memory(step, part) <= bound(step) for part in parts):
            cuts.append(sum(shared_tokens(step, part) for part in parts))
    cut = shared_cut(step["prompts"], step["completions"], step["keys"], step["parts"], largest=bound(step))
    assert (cut is None) == (not cuts)
    if cut:
        assert sorted(row for part in cut.parts for row in part) == list(rows) and len(cut.parts) == step["parts"]
        assert cut.tokens == sum(shared_tokens(step, part) for part in cut.parts) == min(cuts)


@checked
@given(steps(), st.sampled_from([0.0, 0.01]))
def test_the_cheaper_of_both_is_taken(step: dict[str, Any], attention: float) -> None:
    inputs = {name: step[name] for name in ("prompts", "completions", "keys", "parts")}
    cut = best_cut(**inputs, largest=bound(step), attention=attention)
    plain = best_cut(**inputs, largest=bound(step), attention=attention, sharing=False)
    always = best_cut(**inputs, largest=bound(step), attention=attention, always=True)
    assert not plain.shared and cut.cost <= plain.cost
    assert cut.shared == (always.shared and always.cost * 1.1 < plain.cost)


def test_long_prompts_are_shared_and_short_ones_are_not() -> None:
    # 4 groups of 8, completions of 4 to 67 tokens. Prompts of 512: 32 (512 + ~50) against 4 x 512 + 32 x 60.
    keys = [row // 8 for row in range(32)]
    completions = [4 + 9 * (row % 8) for row in range(32)]
    for prompt, shared in ((512, True), (2, False)):
        cut = best_cut([prompt] * 32, completions, keys, 4, largest=8 * (prompt + 67), attention=1 / 1536)
        assert cut.shared == shared


def test_of_cuts_that_cost_the_same_the_most_even_one_is_taken() -> None:
    # One group of 16: every cut into 4 computes its prompt 4 times.
    cut = best_cut([512] * 16, [8] * 16, [0] * 16, 4, largest=4 * 520, attention=1e-4)
    assert cut.shared and [len(part) for part in cut.parts] == [4, 4, 4, 4]
    assert [len(part) for part in plain_cut([2] * 6, [1] * 6, 3, largest=100).parts] == [2, 2, 2]


def test_too_many_rows_are_sorted_and_cut_evenly(monkeypatch: Any) -> None:
    monkeypatch.setattr(microbatches, "LARGEST", 31)
    cut = plain_cut([1] * 4, [5, 1, 6, 2], 2, largest=14)
    assert cut.parts == ((1, 3), (0, 2)) and cut.tokens == 2 * 3 + 2 * 7
    assert shared_cut([1] * 4, [5, 1, 6, 2], [0, 0, 1, 1], 2, largest=14) is None


def test_a_step_of_512_rows_is_cut_quickly() -> None:
    completions = [(37 * row) % 1000 for row in range(512)]
    cut = plain_cut([100] * 512, completions, 64, largest=8 * 1100)
    assert len(cut.parts) == 64 and cut.tokens < 0.6 * 512 * 1100


@pytest.mark.parametrize("parts", [1, 4])
def test_as_many_parts_as_rows_is_no_padding_and_one_part_is_all(parts: int) -> None:
    cut = plain_cut([2] * 4, [1, 2, 3, 4], parts, largest=100)
    assert cut.tokens == (4 * 6 if parts == 1 else 3 + 4 + 5 + 6)
