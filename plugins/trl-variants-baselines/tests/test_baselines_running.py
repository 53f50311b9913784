"""Baselines with a memory: what they remember, when it moves, and that it survives a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from baselines_common import close, double, recipe

from trl_variants.testing import make_rollout, train_config

FIRST, SECOND = [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]


def rollouts(variant: str, *batches: Any, overrides: Any = None, **estimator: Any) -> tuple[list[Any], dict[str, Any]]:
    """Advantages of one rollout after another, and the state at the end."""
    whole, states, out = recipe(variant, advantage_estimator=estimator, **(overrides or {})), {}, []
    for batch in batches:
        result = whole.advantages(batch if not isinstance(batch, list) else make_rollout(batch), states=states)
        states = result.states
        out.append(result.advantages)
    return out, next(iter(states.values()))


def test_the_running_mean_is_that_of_earlier_rollouts() -> None:
    (first, second), state = rollouts("reinforce_running", FIRST, SECOND)
    close(first, FIRST)  # nothing before: 0
    close(second, [0.5, 0.5, 0.5, -0.5])  # mean of the first, 1/2
    assert state == {"count": 8, "mean": pytest.approx(5 / 8)}
    (first, _), _ = rollouts("reinforce_running", FIRST, SECOND, start=0.25)
    close(first, [0.75, -0.25, 0.75, -0.25])


def test_the_running_mean_may_hold_the_current_rollout() -> None:
    (first, second), state = rollouts("reinforce_running", FIRST, SECOND, include_current=True)
    close(first, [0.5, -0.5, 0.5, -0.5])
    close(second, [3 / 8, 3 / 8, 3 / 8, -5 / 8])  # 5 of 8
    assert state == {"count": 8, "mean": pytest.approx(5 / 8)}


def test_the_moving_average_moves_once_per_rollout() -> None:
    # 0, then .95 * 0 + .05 * 1/2 = .025, then .95 * .025 + .05 * 3/4 = .06125
    (first, second), state = rollouts("reinforce_ema", FIRST, SECOND)
    close(first, FIRST)
    close(second, [0.975, 0.975, 0.975, -0.025])
    assert state == {"baseline": pytest.approx(0.06125, abs=1e-15)}
    (first, second), _ = rollouts("reinforce_ema", FIRST, SECOND, start=0.5, decay=0.5)
    close(first, [0.5, -0.5, 0.5, -0.5])
    close(second, [0.5, 0.5, 0.5, -0.5])  # (1/2 + 1/2) / 2


def test_the_moving_average_may_move_before() -> None:
    (first, second), state = rollouts("reinforce_ema", FIRST, SECOND, include_current=True, decay=0.5)
    close(first, [0.75, -0.25, 0.75, -0.25])  # (0 + 1/2) / 2
    close(second, [0.5, 0.5, 0.5, -0.5])  # (1/4 + 3/4) / 2
    assert state == {"baseline": 0.5}


def test_the_moving_average_may_move_once_per_completion() -> None:
    # four steps of one half to the mean 1/2: 1/2 (1 - 1/16) = 15/32
    _, state = rollouts("reinforce_ema", FIRST, per="completion", decay=0.5)
    assert state == {"baseline": pytest.approx(15 / 32, abs=1e-15)}
    # as one after the other gives it where all rewards are equal
    baseline = 0.0
    for _ in range(3):
        baseline = 0.9 * baseline + 0.1 * 0.7
    _, state = rollouts("reinforce_ema", [0.7] * 3, per="completion", decay=0.9)
    assert state == {"baseline": pytest.approx(baseline, abs=1e-15)}


@pytest.mark.parametrize("variant", ["reinforce_running", "reinforce_ema"])
def test_only_what_is_scored_and_kept_is_remembered(variant: str) -> None:
    part = make_rollout([1.0, 0.0, 9.0], scored=[True, True, False], group_size=1)
    _, state = rollouts(variant, part)
    _, expected = rollouts(variant, make_rollout([1.0, 0.0], group_size=1))
    assert state == expected
    # the filter drops the second group, whose rewards are equal
    two = make_rollout([1.0, 0.0, 5.0, 5.0], group_size=2)
    (advantages,), state = rollouts(variant, two, overrides={"sample_filter": "zero_variance"})
    assert state == expected
    close(advantages, [1.0, 0.0, 5.0, 5.0])
    # a rollout that counts for nothing changes nothing
    nothing = make_rollout([0.0, 0.0], scored=[False, False])
    _, state = rollouts(variant, part, nothing)
    assert state == expected
    (advantages,), _ = rollouts(variant, nothing)
    close(advantages, double([0.0, 0.0]))


@pytest.mark.parametrize("variant", ["reinforce_running", "reinforce_ema"])
def test_the_state_is_plain_numbers(variant: str, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64):
        _, state = rollouts(variant, make_rollout(torch.tensor(FIRST, dtype=dtype)))
        assert {type(value) for value in state.values()} <= {int, float}
        torch.save(state, tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True) == state


@pytest.mark.parametrize("variant", ["reinforce_running", "reinforce_ema"])
def test_a_resumed_run_goes_on_with_the_baseline(variant: str, tmp_path: Path) -> None:
    config = Path(__file__).parent.parent / "configs" / f"{variant}.yaml"
    settings = {"plugins": ["trl_variants_baselines"], "steps": 3, "save_strategy": "steps", "save_steps": 1}
    whole = train_config(config, tmp_path, **settings)
    states = [_state(tmp_path, step) for step in (1, 2, 3)]
    assert states[0] != states[1] != states[2]
    resumed = train_config(config, tmp_path, resume_from_checkpoint=tmp_path / "out" / "checkpoint-1", **settings)
    assert [_state(tmp_path, step) for step in (2, 3)] == states[1:]
    assert [entry["loss"] for entry in resumed[1:]] == [entry["loss"] for entry in whole[1:]]


def _state(folder: Path, step: int) -> dict[str, float]:
    saved = torch.load(folder / "out" / f"checkpoint-{step}" / "variant_state.pt", weights_only=True)
    (state,) = saved["states"].values()
    return state
