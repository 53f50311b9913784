"""TRL's ``off_policy_mask_threshold`` as the oracle of `off_policy_mask`: the same run, within 1e-6."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests import tiny
from tests.trainer import runs
from tests.trainer.test_oracle import Run, assert_same, ours, stock

PLUGIN = "trl_variants_offpolicy"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model and its tokenizer in a folder."""
    return tiny.saved(tmp_path_factory.mktemp("model"))


def masked(variant: str, folder: Any, path: str, threshold: float, **settings: Any) -> Run:
    weight = [{"name": "off_policy_mask", "threshold": threshold}]
    return ours(variant, folder, path, variant_plugins=[PLUGIN], variant_overrides={"token_weight": weight}, **settings)


def assert_matters(run: Run, variant: str, folder: Any, path: str, **settings: Any) -> None:
    """With another threshold, all and no negative examples masked, the runs are others."""
    for threshold in (0.0, 1e6):
        assert (masked(variant, folder, path, threshold, **settings).weights - run.weights).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("variant", "rate"), [("trl_grpo", 0.03), ("trl_dapo", 0.03), ("trl_dr_grpo", 0.2), ("trl_cispo", 0.03)]
)
def test_drift_from_the_old_policy_masks_as_in_trl(variant: str, rate: float, tmp_path: Any, path: str) -> None:
    # No engine's log-probs: TRL takes the old policy's. At the first update on a rollout nothing has drifted; small
    # steps, so that what the mask takes is not clipped already.
    settings = {"num_iterations": 2, "max_steps": 4, "learning_rate": rate}
    theirs = stock(variant, tmp_path / "a", path, off_policy_mask_threshold=0.05, **settings)
    mine = masked(variant, tmp_path / "b", path, 0.05, **settings)
    assert_same(theirs, mine)
    assert_matters(mine, variant, tmp_path / "c", path, **settings)


@pytest.mark.parametrize("variant", ["trl_grpo", "trl_dapo"])
def test_distance_from_the_engine_masks_as_in_trl(variant: str, tmp_path: Any, path: str) -> None:
    # The engine's log-probs are off by noise, and it could not score some tokens.
    policy = tiny.model()

    def sampled(prompt: str, index: int, tokens: list[int]) -> list[float | None]:
        ids = torch.tensor([[*tiny.tokenizer()(prompt)["input_ids"], *tokens]])
        with torch.no_grad():
            logs = policy(input_ids=ids).logits.double().log_softmax(-1)[0, -len(tokens) - 1 : -1]
        draw = random.Random(f"engine|{prompt}|{index}")
        exact = [logs[i, token].item() for i, token in enumerate(tokens)]
        return [None if draw.random() < 0.1 else value + draw.gauss(0, 0.6) for value in exact]

    given = {"rollout_func": runs.scripted(logprobs=sampled)}
    settings: dict[str, Any] = {"num_iterations": 2, "max_steps": 4, "given": given}
    theirs = stock(variant, tmp_path / "a", path, off_policy_mask_threshold=0.1, **settings)
    mine = masked(variant, tmp_path / "b", path, 0.1, **settings)
    assert any(output["sampling_per_token_logps"].isnan().any() for output in mine.outputs)
    assert_same(theirs, mine)
    assert_matters(mine, variant, tmp_path / "c", path, **settings)
