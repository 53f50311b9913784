"""The stream of prompts: every prompt once an epoch, whatever is taken at a time, and from any position again."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from trl_variants import VariantError, VariantTrainer
from trl_variants.trainer.prompts import PromptStream

ROWS = st.integers(1, 12)
TAKES = st.lists(st.integers(0, 9), max_size=12)


def rows(count: int) -> list[dict[str, int]]:
    return [{"number": i} for i in range(count)]


def numbers(stream: PromptStream, count: int) -> list[int]:
    return [row["number"] for row in stream.take(count)]


def iterable(count: int) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows(count)))


@given(ROWS, TAKES, st.booleans(), st.integers(0, 5))
def test_every_prompt_comes_once_an_epoch_whatever_is_taken_at_a_time(
    count: int, takes: list[int], shuffle: bool, seed: int
) -> None:
    stream = PromptStream(rows(count), seed=seed, shuffle=shuffle)
    parts = [numbers(stream, n) for n in takes]
    assert [len(part) for part in parts] == takes
    drawn = sum(parts, [])
    for start in range(0, len(drawn), count):
        epoch = drawn[start : start + count]
        assert len(set(epoch)) == len(epoch)  # none twice
        assert len(epoch) < count or sorted(epoch) == list(range(count))  # none lost
    if not shuffle:
        assert drawn == [i % count for i in range(len(drawn))]
    # How it is cut changes nothing.
    assert drawn == numbers(PromptStream(rows(count), seed=seed, shuffle=shuffle), len(drawn))


@given(ROWS, st.integers(0, 40), st.integers(0, 20), st.booleans())
def test_it_goes_on_from_any_position_across_epochs(count: int, before: int, after: int, shuffle: bool) -> None:
    stream = PromptStream(rows(count), seed=1, shuffle=shuffle)
    stream.take(before)
    again = PromptStream(rows(count), seed=1, shuffle=shuffle)
    again.load(stream.state())
    assert numbers(again, after) == numbers(stream, after)
    assert again.state() == stream.state()


def test_a_position_goes_back_too() -> None:
    stream = PromptStream(rows(7), seed=1)
    start, drawn = stream.state(), numbers(stream, 10)
    stream.load(start)
    assert numbers(stream, 10) == drawn


def test_the_order_is_of_the_seed_and_the_epoch() -> None:
    def epochs(seed: int) -> tuple[tuple[int, ...], ...]:
        stream = PromptStream(rows(50), seed=seed)
        return tuple(tuple(numbers(stream, 50)) for _ in range(3))

    assert epochs(0) == epochs(0)
    assert len({*epochs(0), *epochs(1)}) == 6


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_iterable_dataset_is_begun_anew_at_its_end_and_skipped_to_a_position(shuffle: bool) -> None:
    stream = PromptStream(iterable(5), seed=2, shuffle=shuffle)
    drawn = numbers(stream, 3) + numbers(stream, 9)
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == [0, 1, 2, 3, 4]
    if not shuffle:
        assert drawn == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert stream.state() == {"epoch": 2, "index": 2}
    again = PromptStream(iterable(5), seed=2, shuffle=shuffle)
    again.load(stream.state())
    assert numbers(again, 11) == numbers(stream, 11)


def test_an_iterable_dataset_is_shuffled_differently_in_each_epoch() -> None:
    stream = PromptStream(iterable(40), seed=2, shuffle=True)
    assert numbers(stream, 40) != numbers(stream, 40)


def test_a_plain_iterable_is_walked_as_it_is() -> None:
    class Plain:
        def __iter__(self) -> Any:
            return islice(iter(rows(9)), 3)

    assert numbers(PromptStream(Plain(), seed=0, shuffle=True), 7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("empty", [[], IterableDataset.from_generator(lambda: iter(()))])
def test_an_empty_dataset_is_an_error(empty: Any) -> None:
    with pytest.raises(VariantError, match="The training dataset is empty"):
        PromptStream(empty, seed=0, shuffle=False).take(1)


def test_rows_of_a_dataset_are_new_objects_each_time() -> None:
    stream = PromptStream(Dataset.from_dict({"prompt": ["a"]}), seed=0)
    first, second = stream.take(2)
    first["prompt"] = "changed"
    assert second == {"prompt": "a"}


def test_a_dataset_smaller_than_one_rollout_is_refused_and_not_trained_on_in_silence(tmp_path: Any) -> None:
    trainer = VariantTrainer(
        model=tiny.model(),
        reward_funcs=tiny.low_words,
        args=tiny.config(tmp_path, "reinforce", num_generations=1),
        train_dataset=tiny.dataset(7),
        processing_class=tiny.tokenizer(),
    )
    with pytest.raises(VariantError, match=r"has 7 prompts, and one rollout takes 8 \(generation_batch_size 8"):
        trainer.train()
