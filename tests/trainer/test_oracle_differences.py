"""Where TRL itself is wrong: the difference is shown, and why."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests import tiny
from tests.trainer import runs
from tests.trainer.test_oracle import ours, stock

# -- where stock is wrong ------------------------------------------------------------------------------------------


def constant(completions: list[str], **_: Any) -> list[float]:
    """0.7 for everything: there is nothing to learn."""
    return [0.7] * len(completions)


def test_eight_equal_rewards_are_a_signal_to_trl_and_none_to_us(tmp_path: Any, path: str) -> None:
    # In float32 the mean of eight times 0.7 comes out one unit in the last place, 2^-24 = 5.96e-8, below 0.7. Each
    # advantage is that rounding error over (std + 1e-4), and the std is of the same rounding: 5.96e-8 / 1e-4 = 5.96e-4
    # for every completion, which raises the probability of whatever was sampled. `trl_grpo` does as TRL does; a
    # group-centred variant of ours knows a constant group.
    settings = {"num_generations": 8, "max_steps": 1, "rewards": constant}
    theirs = stock("trl_grpo", tmp_path / "a", path, **settings)
    assert theirs.advantages[0].tolist() == pytest.approx([5.96e-4] * 8, abs=1e-6)
    assert_close = torch.testing.assert_close
    assert_close(ours("trl_grpo", tmp_path / "b", path, **settings).advantages[0], theirs.advantages[0])
    for variant in ("grpo", "rloo", "dr_grpo", "dapo", "gspo", "cispo"):
        overrides = {"kl": "none", "reward_shaper": "none"}
        mine = ours(variant, tmp_path / "c", path, variant_overrides=overrides, **settings)
        assert mine.advantages[0].tolist() == [0.0] * 8
        assert mine.norms == [0.0]


@pytest.mark.parametrize("variant", ["trl_dapo", "trl_cispo"])
def test_windows_of_unequal_length_are_scaled_by_trl_and_not_by_us(variant: str, tmp_path: Any) -> None:
    # pains A02. A rollout of 16 completions is used in two optimizer steps. TRL divides each by half of the rollout's
    # tokens, whatever the step's own are: a step with few tokens counts too little, one with many too much. At lr 0
    # both trainers see the same policy and rows, so TRL's loss times half the rollout's tokens over its own is ours.
    given = {"rollout_func": runs.scripted()}
    settings = {"given": given, "steps_per_generation": 4, "max_steps": 2, "learning_rate": 0.0}
    theirs = stock(variant, tmp_path / "a", tiny.model(), **settings)
    mine = ours(variant, tmp_path / "b", tiny.model(), **settings)
    windows = [mine.trainer._buffered_inputs[:2], mine.trainer._buffered_inputs[2:]]
    tokens = [sum(int(batch["loss_mask"].sum()) for batch in window) for window in windows]
    assert tokens[0] != tokens[1]
    for step in range(2):
        factor = sum(tokens) / 2 / tokens[step]
        assert abs(factor - 1) > 0.02
        assert mine.losses[step] == pytest.approx(theirs.losses[step] * factor, abs=1e-6)
        assert mine.norms[step] == pytest.approx(theirs.norms[step] * factor, rel=1e-4)


def tools(prompt: str, index: int, tokens: list[int]) -> list[int]:
    """Every third token was written by a tool."""
    return [int(i % 3 != 1) for i in range(len(tokens))]


def written(prompt: str, index: int) -> list[int]:
    """Tools write token 9, which the policy never does."""
    tokens = runs.completion(prompt, index)
    return [9 if i % 3 == 1 else 10 if token == 9 else token for i, token in enumerate(tokens)]


def unlikely() -> Any:
    """A model whose log-prob of token 9 is about -1e6 and moves by hundreds with every step."""
    model = tiny.model()
    head = torch.nn.Linear(16, 32)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.weight[9] *= 1e4
        head.bias.zero_()
        head.bias[9] = -1e6
    model.lm_head = head.requires_grad_(False)
    return model


def test_an_unlikely_tool_token_is_nan_to_trl_and_nothing_to_us(tmp_path: Any) -> None:
    # On the second step the log-ratio of a tool token is in the hundreds: its exp is infinite, and TRL then multiplies
    # by a mask of 0. Infinity times 0 is NaN, in the loss or at least in its gradient, and with it every weight.
    given = {"rollout_func": runs.scripted(written, env_mask=tools)}
    settings = {"given": given, "steps_per_generation": 4, "max_steps": 2}
    theirs = stock("trl_dapo", tmp_path / "a", unlikely(), **settings)
    mine = ours("trl_dapo", tmp_path / "b", unlikely(), **settings)
    assert math.isfinite(theirs.norms[0]) and math.isnan(theirs.norms[1])
    assert theirs.weights.isnan().any()
    assert all(map(math.isfinite, [*mine.losses, *mine.norms])) and mine.norms[1] > 0
    assert mine.weights.isfinite().all()


def test_padding_after_a_stop_token_of_ones_own_is_policy_to_trl_and_not_to_us(tmp_path: Any, path: str) -> None:
    # generation_kwargs may name further stop tokens. generate() stops there and fills up with <pad>, but TRL looks for
    # the model's own <eos> only, so the filling counts as what the policy said: in lengths, masks and loss.
    settings = {"generation_kwargs": {"eos_token_id": [1, *range(3, 17)]}, "max_steps": 1}
    theirs = stock("trl_dapo", tmp_path / "a", path, **settings).outputs[0]
    mine = ours("trl_dapo", tmp_path / "b", path, **settings).outputs[0]
    pads = [((out["completion_ids"] == 0) & out["completion_mask"].bool()).sum().item() for out in (theirs, mine)]
    assert pads[0] > 5 and pads[1] == 0
    assert torch.equal(theirs["completion_ids"], mine["completion_ids"])
