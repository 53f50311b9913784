"""Runs of two processes under FSDP2: those of ``parallel.py``, and checkpoints. As a script: what torchrun starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.trainer import parallel  # first: it sets the environment

# isort: split
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from tests import tiny
from tests.trainer import runs
from trl_variants.trainer.fsdp import named_state, reshard

SHARDED: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}
#: The same, with weights sent from the first process.
LOADED_ONCE: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "cpu_ram_efficient_loading": True}}
#: A separate and a shared critic, clipping, warm-up, an early stop, adapters; no critic, and KL in the loss.
CASES = ("stateful", "ppo", "ppo_shared", "warm_up", "target_kl", "ppo_lora", "ppo_shared_lora")
#: Adam, a schedule and a warm-up; rollouts begin before steps 1 and 3.
SAVED: dict[str, Any] = {
    "num_generations": 1,
    "num_iterations": 2,
    "rows": 64,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "lr_scheduler_type": "linear",
    "critic_learning_rate": 0.02,
    "critic_warmup_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
}
#: Kind of critic, with adapters, how accelerate saves the policy.
CHECKPOINTS = {
    "separate": ("separate", False, "FULL_STATE_DICT"),
    "shared": ("shared", False, "SHARDED_STATE_DICT"),
    "separate_lora": ("separate", True, "FULL_STATE_DICT"),
    "shared_lora": ("shared", True, "FULL_STATE_DICT"),
}
#: Kind of critic, with adapters: the runs in bfloat16.
MIXED = {"separate": ("separate", False), "shared": ("shared", False), "separate_lora": ("separate", True)}


def shard_on_the_cpu() -> None:
    """Let accelerate shard over CPUs too: it takes FSDP's settings with accelerators only, though torch needs none."""
    begin = AcceleratorState.__init__

    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = __init__


def built(name: str, folder: Any, **settings: Any) -> runs.Watched:
    """A trainer that saves checkpoints; the same in one process where ``settings`` has no FSDP."""
    critic, adapted, _ = CHECKPOINTS[name]
    options: dict[str, Any] = {"eval_dataset": tiny.dataset(4)}
    if adapted:
        options["peft_config"] = parallel.LORA["peft_config"]()
    overrides = {"critic": critic}
    return runs.build(folder, "ppo", options=options, variant_overrides=overrides, **{**SAVED, **settings})


def state_of(trainer: runs.Watched) -> dict[str, Any]:
    """Everything that a checkpoint of the critic holds, and the policy."""
    critic = trainer.critic
    for model in (trainer.model, critic.model):  # what a scoring forward has gathered is no copy to trust
        reshard(model)
    return {
        "policy": runs.weights(trainer.model),
        "critic": {name: runs.whole(p) for name, p in critic.model.named_parameters()},
        "optimizer": named_state(critic._optimizer, critic._names, keep=True),
        "scheduler": critic._scheduler.state_dict(),
    }


def checkpoints(folder: Path, rank: int) -> None:
    """Whole and resumed runs, and a run that takes the critic of one process."""
    for name, (_, _, kind) in CHECKPOINTS.items():
        settings = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": kind}}
        whole = built(name, folder / f"saved-{name}", **settings)
        whole.train()
        again = built(name, folder / f"saved-{name}", **settings)
        again.train(resume_from_checkpoint=str(folder / f"saved-{name}" / "checkpoint-2"))
        seen = {"whole": state_of(whole), "again": state_of(again)}
        seen["logs"] = [whole.logs, again.logs]
        again.critic.load(str(folder / f"alone-{name}" / "checkpoint-4"))
        seen["from one"] = state_of(again)
        if kind == "FULL_STATE_DICT":
            again.save_model(str(folder / f"export-{name}"))
        torch.save(seen, folder / f"saved-{name}-{rank}.pt")


def best(folder: Path, rank: int) -> None:
    """A run that takes its first checkpoint back at the end."""
    trainer = built(
        "separate",
        folder / "best",
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=2,
        num_generations_eval=1,
        metric_for_best_model="eval_step",
        greater_is_better=False,
        load_best_model_at_end=True,
        **SHARDED,
    )
    evaluate = trainer.evaluate
    trainer.evaluate = lambda **kwargs: {**evaluate(**kwargs), "eval_step": trainer.state.global_step}
    trainer.train()
    torch.save(state_of(trainer), folder / f"best-{rank}.pt")


def mixed(folder: Path, rank: int) -> None:
    """The values of a second step, computed in bfloat16 below the head."""
    for kind in ("separate", "shared"):
        trainer = built(kind, folder / "bf16", bf16=True, max_steps=2, save_strategy="no", **SHARDED)
        trainer.train()
        values, mask = trainer.spy.batches[-1][0].values, trainer.spy.batches[-1][0].mask
        torch.save(values.detach()[mask], folder / f"bf16-{kind}-{rank}.pt")


def rounded(folder: Path, rank: int) -> None:
    """Runs in bfloat16 whose first forward is the reference's, as where an engine generates."""
    for name, (critic, adapted) in MIXED.items():
        torch.save(
            in_bfloat16(folder / f"mixed-{name}", critic, adapted, **SHARDED), folder / f"mixed-{name}-{rank}.pt"
        )


def in_bfloat16(folder: Path, critic: str, adapted: bool, **settings: Any) -> dict[str, Any]:
    """What the loss was given in a run under mixed precision, step by step."""
    trainer = runs.build(
        folder,
        "ppo",
        model=tiny.model(dtype=torch.bfloat16),
        options={
            "rollout_func": runs.scripted(),
            **({"peft_config": parallel.LORA["peft_config"]()} if adapted else {}),
        },
        **{"bf16": True, "num_generations": 1, "num_iterations": 2, "max_steps": 2, "per_device_train_batch_size": 2},
        **{"variant_overrides": {"critic": critic}, **runs.SGD, **settings},
    )
    trainer.train()
    names = ("log_probs", "old_log_probs", "ref_log_probs", "entropies", "values")
    batches = [batch for batch, *_ in trainer.spy.batches]
    return {name: [getattr(batch, name).detach()[batch.mask] for batch in batches] for name in names}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    parallel.unshuffled()
    shard_on_the_cpu()
    rank = int(os.environ["RANK"])
    for name in CASES:
        engine = LOADED_ONCE if name == "target_kl" else SHARDED
        seen = parallel.run(name, folder / name, per_device=2, accumulation=2, eval_rows=16, **engine)
        torch.save(seen, folder / f"{name}-{rank}.pt")
    checkpoints(folder, rank)
    best(folder, rank)
    mixed(folder, rank)
    rounded(folder, rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
