"""Runs that give the same numbers in one process and in two. As a script: what torchrun starts.

Rows are cut into micro-batches in the order in which they were made (no shuffling), so that two processes of two
micro-batches of two rows hold the same micro-batches as one process of four.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import torch
from accelerate import Accelerator
from peft import LoraConfig
from trl.trainer import grpo_trainer

from tests import tiny
from tests.trainer import runs
from trl_variants import KL, use
from trl_variants.trainer.batch import gather_ragged

ADAPTIVE = use("adaptive", target=0.01, horizon=80)
LORA = {"peft_config": lambda: LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")}


def write(prompt: str, index: int) -> list[int]:
    """Short completions of one prompt, long ones of the other: 2 or 3 tokens a row against 9 to 12."""
    short = prompt == tiny.dataset(2)["prompt"][0]
    length = 2 + index % 2 if short else 9 + index % 4
    tokens = [3 + (7 * index + 5 * i + 1) % 29 for i in range(length)]
    return [*tokens[:-1], 1] if index % 3 else tokens


def logprobs(prompt: str, index: int, tokens: list[int]) -> list[float]:
    """An engine's, which are not those of the policy."""
    return [-3.2 - 0.3 * ((i + index) % 3) for i in range(len(tokens))]


def env_mask(prompt: str, index: int, tokens: list[int]) -> list[int]:
    """The environment wrote every fourth token, and all of one completion."""
    return [int(i % 4 != 2 and index != 3) for i in range(len(tokens))]


def some_signal(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    """None in prompts 0, 3, 4 and 7: their groups are equal."""
    dense = tiny.low_words(completion_ids)
    return [0.5 if n in (0, 3, 4, 7) else value for value, n in zip(dense, number, strict=True)]


#: Rollouts of 3 groups of 4, the second half on one process and half on the other. (0 1 2) keeps two, (3 4 5) one: full
#: after two rounds. (6 7 8) keeps two, (9 10 11) all: two are surplus, and go first into the third rollout.
RESAMPLED: dict[str, Any] = {
    "rows": 16,
    "per_device": 3,
    "shuffle_dataset": False,
    "rewards": some_signal,
    "max_steps": 4,
}

#: Name: variant, settings. Groups of 8 lie half on one process and half on the other, groups of 4 on one each.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "reinforce": ("reinforce", {}),
    "rloo": ("rloo", {}),
    **{
        name: (name, {"num_iterations": 2})
        for name in ("grpo", "reinforce_pp", "reinforce_pp_baseline", "dr_grpo", "dapo", "gspo", "cispo", "trl_bnpo")
    },
    "split_group": ("grpo", {"num_generations": 8, "num_iterations": 2}),
    "split_group_rloo": ("rloo", {"num_generations": 8}),
    "split_group_tokens": ("reinforce_pp", {"num_generations": 8, "num_iterations": 2}),
    "one_each": ("reinforce_pp", {"num_generations": 1, "rows": 8}),
    "tools": ("dapo", {"num_iterations": 2, "fields": {"env_mask": env_mask}, "overrides": {"reward_shaper": "none"}}),
    "engine": (
        "trl_dapo",
        {
            "num_iterations": 2,
            "fields": {"logprobs": logprobs},
            "overrides": {"token_weight": {"mode": "sequence_truncate", "clip_max": 1.5}},
        },
    ),
    "stateful": (
        "grpo",
        {
            "num_iterations": 2,
            "overrides": {
                "kl": KL("k3", placement="loss", coef=0.2, controller=ADAPTIVE),
                "regularizer": use("adaptive_entropy", target=10.0, delta=0.1),
            },
        },
    ),
    "steered_reward": ("reinforce_pp", {"overrides": {"kl": {"coef": 0.3, "controller": ADAPTIVE}}}),
    "sequence_kl": ("trl_rloo", {"num_iterations": 2, "overrides": {"kl": {"coef": 0.3}}}),
    "ppo": ("ppo", {"num_generations": 1, "rows": 8, "num_iterations": 3, "critic_max_grad_norm": 0.02}),
    "ppo_shared": ("ppo", {"overrides": {"critic": "shared"}, "num_iterations": 3}),
    "ppo_lora": ("ppo", {"options": LORA, "num_iterations": 2}),
    "ppo_shared_lora": ("ppo", {"options": LORA, "overrides": {"critic": "shared"}, "num_iterations": 2}),
    "ppo_tools": ("ppo", {"fields": {"env_mask": env_mask}, "num_iterations": 2}),
    "warm_up": ("ppo", {"overrides": {"critic": "shared"}, "num_iterations": 2, "critic_warmup_steps": 2}),
    "target_kl": ("ppo", {"num_iterations": 3, "target_kl": 1e-5}),
    "resampled": ("dapo", RESAMPLED),
    "resampled_tools": (
        "dapo",
        {**RESAMPLED, "num_iterations": 2, "max_steps": 6, "fields": {"env_mask": env_mask, "logprobs": logprobs}},
    ),
    "resampled_kl": (
        "reinforce_pp",
        {**RESAMPLED, "overrides": {"sampling": "resample", "sample_filter": "zero_variance", "kl": {"coef": 0.3}}},
    ),
    "resampled_critic": (
        "ppo",
        {
            **RESAMPLED,
            "num_iterations": 1,
            "overrides": {"sampling": "resample", "sample_filter": "zero_variance"},
        },
    ),
    "resampled_short": ("dapo", {**RESAMPLED, "max_rounds": 1}),
    "shared_prompts": ("grpo", {"share_prompts": "always", "num_iterations": 2}),
    "ppo_shared_prompts": ("ppo", {"share_prompts": "always", "num_iterations": 2}),
    "truncated": ("trl_grpo", {"overrides": {"sample_filter": "truncated"}, "max_completion_length": 12}),
}


def run(name: str, folder: Any, per_device: int, accumulation: int, **engine: Any) -> dict[str, Any]:
    """Train a few optimizer steps; what came of it, as plain data."""
    variant, settings = CASES[name]
    settings = {"num_generations": 4, "rows": 2, "max_completion_length": 12, "max_steps": 3, **settings}
    settings = {"eval_rows": 5, "per_device_eval_batch_size": 8, **settings, **engine}
    options = {name: make() for name, make in settings.pop("options", {}).items()}
    eval_rows = settings.pop("eval_rows")
    per_device, rewards = settings.pop("per_device", per_device), settings.pop("rewards", tiny.low_words)
    rows, fields, overrides = settings.pop("rows"), settings.pop("fields", {}), settings.pop("overrides", None)
    trainer = runs.build(
        folder,
        variant,
        rows=rows,
        rewards=rewards,
        options={"rollout_func": runs.scripted(write, **fields), "eval_dataset": tiny.dataset(eval_rows), **options},
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_generations_eval=1,
        variant_overrides=overrides,
        **{**runs.SGD, **settings},
    )
    trainer.train()
    rollout, result, _ = trainer.spy.rollouts[0]
    return {
        "processes": trainer.accelerator.num_processes,
        "kind": str(trainer.accelerator.distributed_type),
        "gradients": trainer.gradients,
        "critic_gradients": trainer.critic_gradients,
        "weights": runs.weights(trainer.model),
        "critic": runs.weights(trainer.critic.model) if trainer.critic else torch.zeros(1),
        "logs": [
            {k: v for k, v in entry.items() if not k.startswith(("step_time", "epoch", "speed/"))}
            for entry in trainer.logs
        ],
        "advantages": result.advantages,
        "mask": rollout.mask,
        "own_mask": trainer.generated[0]["loss_mask"],
        "own_advantages": trainer.generated[0]["advantages"],
        "own_carried": [output.get("carried") for output in trainer.generated],
        "table": list(trainer._logs["advantages"]),
        "states": trainer._states,
        "kl_coef": trainer._next_kl_coef,
        "evaluation": trainer.evaluate(),
    }


def launch(module: str, folder: Path) -> None:
    """Run a module in two processes, with a folder to write to."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", module, str(folder)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not done.returncode, done.stderr[-20000:]


def unshuffled() -> None:
    grpo_trainer.shuffle_sequence_dict = lambda batch: batch


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    unshuffled()
    gc.collect()
    gc.freeze()
    rank = int(os.environ["RANK"])
    for name in CASES:
        torch.save(run(name, folder / name, per_device=2, accumulation=2), folder / f"{name}-{rank}.pt")
    resumed(folder, rank)
    accelerator = Accelerator()
    rows = [torch.arange(3 * rank), torch.full((2 - rank, 2), float(rank)), torch.tensor([rank])]
    torch.save([gather_ragged(tensor, accelerator) for tensor in rows], folder / f"gathered-{rank}.pt")


def resumed(folder: Path, rank: int) -> None:
    """A run of two processes, whole and resumed."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "per_device_train_batch_size": 2}
    whole = runs.trained(folder / "whole", "grpo", **settings)
    again = runs.build(folder / "whole", "grpo", **settings)
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    torch.save([runs.weights(whole.model), runs.weights(again.model)], folder / f"resumed-{rank}.pt")
    settings |= {"num_generations": 1, "num_iterations": 1, "rows": 64, "critic_warmup_steps": 1}
    whole = runs.trained(folder / "critic", "ppo", **settings)
    again = runs.build(folder / "critic", "ppo", **settings)
    again.train(resume_from_checkpoint=str(folder / "critic" / "checkpoint-2"))
    both = [torch.cat([runs.weights(t.model), runs.weights(t.critic.model)]) for t in (whole, again)]
    torch.save(both, folder / f"resumed-critic-{rank}.pt")
    settings = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 3, "max_steps": 5}
    settings |= {"rewards": some_signal, "rows": 9}
    whole = runs.trained(folder / "resampled", "dapo", **settings)
    again = runs.build(folder / "resampled", "dapo", **settings)
    again.train(resume_from_checkpoint=str(folder / "resampled" / "checkpoint-3"))
    torch.save([runs.weights(whole.model), runs.weights(again.model)], folder / f"resumed-sampling-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
