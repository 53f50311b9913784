"""TRL itself as the oracle: the same seed and data in TRL's trainer and in ours give the same run.

Advantages, losses, gradient norms and final weights must agree within 1e-6, over several optimizer steps with
gradient accumulation, two epochs over each rollout, and KL where the variant has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests import tiny
from trl_variants import VariantTrainer

GRPO = (GRPOTrainer, GRPOConfig)
RLOO = (RLOOTrainer, RLOOConfig)
#: A trainer of TRL's, its config class, and settings.
Oracle = tuple[Any, Any, dict[str, Any]]
ORACLES: dict[str, Oracle] = {
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
        self.outputs: list[dict[str, Any]] = []
        generate = self.trainer._generate_and_score_completions

        def recorded(inputs: Any) -> Any:
            output = generate(inputs)
            self.advantages.append(output["advantages"].clone())
            self.outputs.append({**output})
            return output

        self.trainer._generate_and_score_completions = recorded
        self.trainer.train()
        logs = [entry for entry in self.trainer.state.log_history if "loss" in entry]
        self.losses = [entry["loss"] for entry in logs]
        self.norms = [entry["grad_norm"] for entry in logs]
        self.clipped = max(entry.get("clip_ratio/region_mean", entry.get("clip_ratio/high_mean", 0)) for entry in logs)
        self.weights = torch.cat([p.detach().flatten() for p in self.trainer.model.parameters()])


def stock(
    oracle: str | Oracle, folder: Any, model: Any, rewards: Any = tiny.low_words, given: Any = None, **settings: Any
) -> Run:
    """A run of TRL's own trainer, that of a variant or another; ``given`` are more arguments of its constructor."""
    trainer, config, options = ORACLES[oracle] if isinstance(oracle, str) else oracle
    merged = {**tiny.SETTINGS, **SGD, "num_generations": 4, **options, **settings}
    return Run(
        lambda: trainer(
            model=model,
            reward_funcs=rewards,
            args=config(output_dir=str(folder), **merged),
            train_dataset=tiny.dataset(),
            processing_class=tiny.tokenizer(),
            **(given or {}),
        )
    )


def ours(
    variant: str, folder: Any, model: Any, rewards: Any = tiny.low_words, given: Any = None, **settings: Any
) -> Run:
    return Run(
        lambda: VariantTrainer(
            model=model,
            reward_funcs=rewards,
            args=tiny.config(folder, variant, **{**SGD, **settings}),
            train_dataset=tiny.dataset(),
            processing_class=tiny.tokenizer(),
            **(given or {}),
        )
    )


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


@pytest.mark.parametrize("variant", ["trl_grpo", "trl_gspo", "trl_rloo"])
def test_two_optimizer_steps_per_rollout_equal_trl(variant: str, tmp_path: Any, path: str) -> None:
    settings = {"steps_per_generation": 4, "max_steps": 4}
    assert_same(stock(variant, tmp_path / "a", path, **settings), ours(variant, tmp_path / "b", path, **settings))


# -- settings beside the variant -----------------------------------------------------------------------------------


def some(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward that skips every third completion."""
    return [None if i % 3 == 0 else len(ids) / 8 for i, ids in enumerate(completion_ids)]


@pytest.mark.parametrize("variant", ["trl_grpo", "trl_rloo"])
def test_weighted_rewards_some_of_them_none_equal_trl(variant: str, tmp_path: Any, path: str) -> None:
    settings = {"rewards": [tiny.low_words, some], "reward_weights": [0.7, 0.3]}
    assert_same(stock(variant, tmp_path / "a", path, **settings), ours(variant, tmp_path / "b", path, **settings))
    only = {"rewards": some}  # so that completions have no reward at all
    assert_same(stock(variant, tmp_path / "c", path, **only), ours(variant, tmp_path / "d", path, **only))


def test_temperature_and_top_k_equal_trl(tmp_path: Any, path: str) -> None:
    settings = {"temperature": 0.7, "top_k": 10, "num_iterations": 2, "max_steps": 4}
    theirs, mine = (run("trl_grpo", tmp_path, path, **settings) for run in (stock, ours))
    assert_same(theirs, mine)


@pytest.mark.parametrize("variant", ["trl_grpo", "trl_dapo"])
def test_masked_truncated_completions_equal_trl(variant: str, tmp_path: Any, path: str) -> None:
    theirs = stock(variant, tmp_path / "a", path, mask_truncated_completions=True)
    mine = ours(variant, tmp_path / "b", path, variant_overrides={"sample_filter": "truncated"})
    assert_same(theirs, mine)
    dropped = [(~output["loss_mask"].any(1)).sum().item() for output in mine.outputs]
    assert 0 < sum(dropped) < 8 * len(dropped)


def test_plain_k3_equals_trl_without_its_correction(tmp_path: Any, path: str) -> None:
    settings = {"num_iterations": 2, "max_steps": 4}
    theirs = stock("trl_grpo", tmp_path / "a", path, use_bias_correction_kl=False, **settings)
    mine = ours("trl_grpo", tmp_path / "b", path, variant_overrides={"kl": {"weighted": False}}, **settings)
    assert_same(theirs, mine)


def test_a_new_adapter_equals_trl(tmp_path: Any, path: str) -> None:
    def given() -> dict[str, Any]:
        return {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")}

    settings = {"num_iterations": 2, "max_steps": 4, "learning_rate": 1.0}
    theirs = stock("trl_grpo", tmp_path / "a", path, given=given(), **settings)
    assert_same(theirs, ours("trl_grpo", tmp_path / "b", path, given=given(), **settings))


@pytest.mark.parametrize("variant", ["trl_grpo", "trl_dapo", "trl_rloo"])
def test_evaluation_equals_trl(variant: str, tmp_path: Any, path: str) -> None:
    def evaluated(run: Any, folder: Any) -> dict[str, Any]:
        done = run(variant, folder, path, given={"eval_dataset": tiny.dataset(3)}, per_device_eval_batch_size=4)
        done.trainer.evaluate()
        (entry,) = (e for e in done.trainer.state.log_history if "eval_loss" in e)
        return entry

    theirs, mine = evaluated(stock, tmp_path / "a"), evaluated(ours, tmp_path / "b")
    assert not {name for name in theirs if name not in mine}, "a metric of TRL's is missing"
    for name, value in theirs.items():
        if not name.endswith(("runtime", "per_second")):
            assert mine[name] == pytest.approx(value, abs=1e-5), name


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of experts in a folder."""
    folder = str(tmp_path_factory.mktemp("experts"))
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("variant", ["trl_grpo", "trl_dapo"])
def test_the_load_balancing_loss_of_experts_equals_trl(variant: str, tmp_path: Any, experts: str) -> None:
    settings = {"num_iterations": 2, "max_steps": 4}
    theirs, mine = (run(variant, tmp_path, experts, **settings) for run in (stock, ours))
    assert_same(theirs, mine)
    balance = [
        [entry["aux_loss"] for entry in run.trainer.state.log_history if "aux_loss" in entry] for run in (theirs, mine)
    ]
    assert balance[0] == pytest.approx(balance[1], abs=1e-6) and len(balance[0]) == 4 and min(balance[0]) > 1
    without = ours(variant, tmp_path, experts, router_aux_loss_coef=0.0, **settings)
    assert without.norms[0] != pytest.approx(mine.norms[0], rel=1e-3)
