"""The objective alone: everything of a loss but the model's forward and backward, of TRL's trainer and of ours.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.objective

Both trainers are handed the same log-probs and entropies in place of a forward; what is timed is process CPU time of
`_compute_loss` and of the backward to those log-probs, for the 8 micro-batches of an optimizer step, by turns in one
process.
"""

from __future__ import annotations

from tests.benchmarks.common import (  # isort: skip (sets the environment)
    SETTINGS,
    model,
    prompts,
    quiet,
    ratio,
    reward,
    silent,
    tokenizer,
)

import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from trl_variants import VariantConfig, VariantTrainer
from trl_variants.data import Totals
from trl_variants.trainer.passes import Scored

TURNS = 25
MICRO_BATCHES = 8
SIZES = ((8, 128), (8, 1024), (32, 1024))
#: Variant of ours, and what stock needs for the same objective.
CASES: dict[str, dict[str, Any]] = {
    "trl_grpo": {"loss_type": "grpo", "beta": 0.04},
    "trl_dapo": {"loss_type": "dapo", "beta": 0.0},
    "trl_gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "beta": 0.0,
    },
}


def trainer(folder: str, variant: str | None, **stock: Any) -> Any:
    kwargs = {"output_dir": folder, "per_device_train_batch_size": 8, "max_steps": 1, **SETTINGS}
    model().save_pretrained(f"{folder}/model")  # stock TRL loads its reference by path
    made = (GRPOTrainer if variant is None else VariantTrainer)(
        model=f"{folder}/model",
        reward_funcs=reward,
        args=GRPOConfig(**kwargs, **stock) if variant is None else VariantConfig(variant=variant, **kwargs),
        train_dataset=prompts(16),
        processing_class=tokenizer(),
    )
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    return silent(made)


def inputs(rows: int, tokens: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    mask = torch.arange(tokens)[None] < torch.randint(tokens // 2, tokens + 1, (rows, 1), generator=draw)
    old = -torch.rand(rows, tokens, generator=draw)
    return {
        "prompt_ids": torch.ones(rows, 4, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 4, dtype=torch.long),
        "completion_ids": torch.ones(rows, tokens, dtype=torch.long),
        "completion_mask": mask.long(),
        "loss_mask": mask,
        "advantages": torch.randn(rows, generator=draw),
        "old_per_token_logps": old,
        "ref_per_token_logps": old - 0.1,
        "rewards": torch.ones(rows),
        "scored": torch.ones(rows, dtype=torch.bool),
        "num_items_in_batch": mask.sum(),
        "totals": Totals.of(mask),
    }


def timed(owner: Any, batch: dict[str, Any], log_probs: Tensor, entropies: Tensor) -> float:
    """CPU seconds of the losses and gradients of one optimizer step."""
    leaf = log_probs.clone().requires_grad_()
    if isinstance(owner, VariantTrainer):
        owner._passes.forward = lambda *_, **__: Scored(leaf * 1.0, entropies, None, None)
    else:
        owner._get_per_token_logps_and_entropies = lambda *_, **__: (leaf * 1.0, entropies, None)
    begin = time.process_time()
    for number in range(MICRO_BATCHES):
        owner.accelerator.gradient_state._set_sync_gradients(number == MICRO_BATCHES - 1)
        owner._compute_loss(owner.model, dict(batch)).backward()
    return time.process_time() - begin


def main() -> None:
    quiet()
    print("objective  rows x tokens   ours / stock        target 1.0")
    with tempfile.TemporaryDirectory() as folder:
        for variant, settings in CASES.items():
            ours, stock = trainer(folder, variant), trainer(folder, None, **settings)
            for rows, tokens in SIZES:
                batch = inputs(rows, tokens)
                log_probs, entropies = batch["old_per_token_logps"] + 0.05, torch.ones(rows, tokens)
                times: dict[Any, list[float]] = {ours: [], stock: []}
                for _ in range(TURNS):
                    for owner, seconds in times.items():
                        seconds.append(timed(owner, batch, log_probs, entropies))
                print(f"{variant:9}  {rows:4} x {tokens:<6}  {ratio(times[ours][5:], times[stock][5:])}", flush=True)


if __name__ == "__main__":
    main()
