"""TRL itself as the oracle: the same seed and data in TRL's trainer and in ours give the same run.

Advantages, losses, gradient norms and final weights must agree within 1e-6, over several optimizer steps with
gradient accumulation, two epochs over each rollout, and KL where the variant has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests import tiny
from trl_variants import VariantTrainer

GRPO = (GRPOTrainer, GRPOConfig)
RLOO = (RLOOTrainer, RLOOConfig)
ORACLES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "trl_grpo": (*GRPO, {"loss_type": "grpo", "beta": 0.04}),
    "trl_dapo": (*GRPO, {}),
    "trl_dr_grpo": (*GRPO, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "trl_bnpo": (*GRPO, {"loss_type": "bnpo"}),
    "trl_cispo": (*GRPO, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "trl_gspo": (
        *GRPO,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "trl_rloo": (*RLOO, {}),
}


# Plain SGD: Adam divides by the gradient's own size, which blows rounding differences up where it is near zero.
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}


class Run:
    """What one run did, step by step."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.trainer = build()
        self.advantages: list[torch.Tensor] = []
        generate = self.trainer._generate_and_score_completions

        def recorded(inputs: Any) -> Any:
            output = generate(inputs)
            self.advantages.append(output["advantages"].clone())
            return output

        self.trainer._generate_and_score_completions = recorded
        self.trainer.train()
        logs = [entry for entry in self.trainer.state.log_history if "loss" in entry]
        self.losses = [entry["loss"] for entry in logs]
        self.norms = [entry["grad_norm"] for entry in logs]
        self.clipped = max(entry.get("clip_ratio/region_mean", entry.get("clip_ratio/high_mean", 0)) for entry in logs)
        self.weights = torch.cat([p.detach().flatten() for p in self.trainer.model.parameters()])


def stock(variant: str, folder: Any, path: str, **settings: Any) -> Run:
    trainer, config, options = ORACLES[variant]
    merged = {**tiny.SETTINGS, **SGD, "num_generations": 4, **options, **settings}
    return Run(
        lambda: trainer(
            model=path,
            reward_funcs=tiny.low_words,
            args=config(output_dir=str(folder), **merged),
            train_dataset=tiny.dataset(),
            processing_class=tiny.tokenizer(),
        )
    )


def ours(variant: str, folder: Any, path: str, **settings: Any) -> Run:
    return Run(
        lambda: VariantTrainer(
            model=path,
            reward_funcs=tiny.low_words,
            args=tiny.config(folder, variant, **{**SGD, **settings}),
            train_dataset=tiny.dataset(),
            processing_class=tiny.tokenizer(),
        )
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.saved(tmp_path_factory.mktemp("model"))


def assert_same(a: Run, b: Run) -> None:
    assert len(a.advantages) == len(b.advantages) and len(a.losses) == len(b.losses) > 1
    for left, right in zip(a.advantages, b.advantages, strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)
    assert a.losses == pytest.approx(b.losses, abs=1e-6)
    assert a.norms == pytest.approx(b.norms, abs=1e-6, rel=1e-6)
    torch.testing.assert_close(a.weights, b.weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("variant", ORACLES)
def test_two_epochs_with_accumulation_equal_trl(variant: str, tmp_path: Any, path: str) -> None:
    settings = {"num_iterations": 2, "max_steps": 4}
    theirs, mine = stock(variant, tmp_path / "a", path, **settings), ours(variant, tmp_path / "b", path, **settings)
    assert_same(theirs, mine)
    print(variant, mine.clipped)


@pytest.mark.parametrize("variant", ["trl_grpo", "trl_gspo", "trl_rloo"])
def test_two_optimizer_steps_per_rollout_equal_trl(variant: str, tmp_path: Any, path: str) -> None:
    settings = {"steps_per_generation": 4, "max_steps": 4}
    assert_same(stock(variant, tmp_path / "a", path, **settings), ours(variant, tmp_path / "b", path, **settings))
