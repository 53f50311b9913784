"""Checkpoints of dynamic sampling: the stream's position and the surplus, so that a run goes on as if uninterrupted."""

from __future__ import annotations

import datetime
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.trainer import runs
from tests.trainer.test_sampling import CARRYING, built, prompts, resampled, timeless

#: Two epochs over each rollout of 2 groups, out of 9 prompts: rollouts begin before steps 1, 3, 5, 7.
SETTINGS: dict[str, Any] = {
    "rows": 9,
    "shuffle_dataset": True,
    "num_iterations": 2,
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 1,
    "learning_rate": 0.02,
}


def some_words(completion_ids: list[list[int]], number: list[int], log_extra: Any, **_: Any) -> list[float]:
    """Of the model's own completions; one prompt in three has no signal."""
    log_extra("day", [datetime.date(2026, 1, 1 + n) for n in number])
    dense = tiny.low_words(completion_ids)
    return [value if n % 3 else 0.0 for value, n in zip(dense, number, strict=True)]


def generated(folder: Any, **settings: Any) -> runs.Watched:
    """A trainer whose model generates."""
    options = {"rollout_func": None, **settings.pop("options", {})}
    return built(folder, (), rewards=some_words, options=options, **{**SETTINGS, **settings})


def alone(whole: Path, step: int, folder: Path) -> str:
    """One checkpoint in a folder of its own."""
    shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    return str(folder / f"checkpoint-{step}")


def state_of(folder: Path, step: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / f"checkpoint-{step}" / "variant_state.pt", weights_only=True)
    return state["sampling"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, runs.Watched]:
    folder = tmp_path_factory.mktemp("run") / "whole"
    trainer = generated(folder)
    trainer.train()
    return folder, trainer


def test_the_run_carries_groups_and_passes_the_end_of_an_epoch(whole: Any) -> None:
    # So that the tests below say something.
    folder, trainer = whole
    positions = [state_of(folder, step)["prompts"] for step in (2, 4, 6, 8)]
    assert positions[0]["epoch"] == 0 and positions[-1]["epoch"] > 0
    held = [state_of(folder, step)["surplus"] is not None for step in (2, 4, 6)]
    assert any(held) and max(entry.get("sampling/rounds", 0) for entry in trainer.logs) > 1


@pytest.mark.parametrize("step", [2, 4, 6])
def test_from_a_rollouts_end_it_goes_on_bit_for_bit(step: int, whole: Any, tmp_path: Any) -> None:
    folder, uninterrupted = whole
    trainer = generated(tmp_path)
    trainer.train(resume_from_checkpoint=alone(folder, step, tmp_path))
    assert torch.equal(runs.weights(trainer.model), runs.weights(uninterrupted.model))
    for mine, theirs in zip(trainer.generated, uninterrupted.generated[step // 2 :], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]), name
    ours, whole_logs = [[timeless(e) for e in t.logs if e["step"] > step] for t in (trainer, uninterrupted)]
    assert ours == whole_logs
    assert list(trainer._logs["prompt"]) == list(uninterrupted._logs["prompt"])
    a, b = trainer.resampler.state(), uninterrupted.resampler.state()
    assert a["prompts"] == b["prompts"] and (a["surplus"] is None) == (b["surplus"] is None)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_from_a_rollouts_middle_it_is_drawn_anew_from_the_same_prompts_and_surplus(step: int, tmp_path: Any) -> None:
    settings = {**SETTINGS, "rows": 20, "shuffle_dataset": False}
    numbers = {*CARRYING, 8, 9, 11}
    uninterrupted = resampled(tmp_path / "a", numbers, **settings)
    drawn = [prompts(output) for output in uninterrupted.generated]
    # (0 1) (2 3) | 3 and (4 5) | (6 7) (8 9) | (10 11) (12 13) ... up to the epoch's end, and 0.
    assert drawn[:3] == [[0, 2], [3, 5], [8, 9]]
    trainer = built(tmp_path / "b", numbers, **settings)
    trainer.train(resume_from_checkpoint=alone(tmp_path / "a", step, tmp_path / "b"))
    assert [prompts(output) for output in trainer.generated] == drawn[step // 2 :]
    carried = [output.get("carried", torch.zeros(8)).tolist() for output in trainer.generated]
    assert carried == [o.get("carried", torch.zeros(8)).tolist() for o in uninterrupted.generated[step // 2 :]]
    if step == 3:  # the carried group still has the log-probs of the policy that generated it
        mine, theirs = (t.generated[i]["carried_log_probs"] for t, i in ((trainer, 0), (uninterrupted, 1)))
        assert torch.equal(mine, theirs)


def test_a_checkpoint_holds_plain_data(whole: Any) -> None:
    folder, _ = whole
    step = next(step for step in (2, 4, 6) if state_of(folder, step)["surplus"])
    state = state_of(folder, step)
    assert (state["generations"], state["reward_names"]) == (4, ["some_words"])
    surplus = state["surplus"]
    rows = len(surplus["prompt"])
    assert rows % 4 == 0 and surplus["carried"].all() and surplus["keep"].all()
    for name, value in surplus.items():
        assert len(value) == rows, name
    for name in ("completion_ids", "completion_mask", "carried_log_probs"):
        assert surplus[name].shape == surplus["completion_ids"].shape
    # What a reward function logged is kept as text where a checkpoint cannot hold it.
    assert all(day.startswith("2026-01-") for day in surplus["extra/day"])


def test_an_iterable_dataset_goes_on_too(tmp_path: Any) -> None:
    def streamed(folder: Path) -> runs.Watched:
        return generated(folder, options={"train_dataset": tiny.dataset(9).to_iterable_dataset()})

    uninterrupted = streamed(tmp_path / "a")
    uninterrupted.train()
    trainer = streamed(tmp_path / "b")
    trainer.train(resume_from_checkpoint=alone(tmp_path / "a", 4, tmp_path / "b"))
    assert uninterrupted.resampler.state()["prompts"]["epoch"] > 0
    assert torch.equal(runs.weights(trainer.model), runs.weights(uninterrupted.model))


@pytest.mark.parametrize("settings", [{"carry_surplus": False}, {"num_generations": 2}])
def test_a_surplus_that_does_not_fit_the_run_is_dropped_and_said(
    settings: dict[str, Any], tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"save_strategy": "steps", "save_steps": 1}
    resampled(tmp_path, CARRYING, max_steps=1, **more)
    assert state_of(tmp_path, 1)["surplus"] is not None
    trainer = built(tmp_path, {*CARRYING, 6, 7}, max_steps=2, **more, **settings)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    log = trainer.logs[1]
    assert log["sampling/carried_groups"] == 0 and "carried" not in trainer.generated[0]
    if "carry_surplus" in settings:
        assert log["sampling/dropped_groups"] == 2  # 3, which waited; and of (4 5) (6 7) the third that is kept
    else:
        assert (
            "The checkpoint carries groups of 4 completions scored by reward, and this run has 2, scored by reward; "
            "they are dropped." in caplog.text
        )


def test_a_checkpoint_of_a_masking_run_starts_at_the_first_prompt(tmp_path: Any) -> None:
    more = {"save_strategy": "steps", "save_steps": 1}
    resampled(tmp_path, range(20), max_steps=1, variant_overrides={"sampling": "mask"}, **more)
    assert "sampling" not in torch.load(tmp_path / "checkpoint-1" / "variant_state.pt", weights_only=True)
    trainer = built(tmp_path, range(20), max_steps=2, **more)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [prompts(output) for output in trainer.generated] == [[0, 1]]


def test_a_second_call_of_train_starts_at_the_first_prompt_without_surplus(tmp_path: Any) -> None:
    trainer = resampled(tmp_path, CARRYING, max_steps=1)
    assert trainer.resampler.state()["surplus"] is not None
    trainer.train()
    assert [prompts(output) for output in trainer.generated] == [[0, 2], [0, 2]]
    assert "carried" not in trainer.generated[1]
