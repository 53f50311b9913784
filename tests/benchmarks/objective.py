"""The objective alone: everything of a loss but the model's forward and backward, of TRL's trainer and of ours.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.objective

Both trainers are handed log-probs and entropies of the same completions in place of a forward, in micro-batches as each
of them cuts; what is timed is process CPU time of `_compute_loss` and of the backward to those log-probs, for the 8
micro-batches of an optimizer step, by turns in one process.
"""

from __future__ import annotations

from tests.benchmarks.common import (  # isort: skip (sets the environment)
    SETTINGS,
    lengths,
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
from trl import GRPOConfig, GRPOTrainer

from trl_variants import VariantConfig, VariantTrainer
from trl_variants.data import Totals
from trl_variants.trainer.microbatches import plain_cut
from trl_variants.trainer.passes import Scored

TURNS = 60
MICRO_BATCHES = 8
SIZES = ((8, "equal"), (8, "long"), (64, "equal"), (64, "long"))
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


LAYOUT: Any = object()


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


def inputs(lengths: list[int], width: int) -> dict[str, Any]:
    """A micro-batch of completions of these lengths, padded to a width."""
    draw = torch.Generator().manual_seed(0)
    rows = len(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    old = -torch.rand(rows, width, generator=draw) * mask
    return {
        "prompt_ids": torch.ones(rows, 4, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 4, dtype=torch.long),
        "completion_ids": torch.ones(rows, width, dtype=torch.long),
        "completion_mask": mask.long(),
        "loss_mask": mask,
        "advantages": torch.randn(rows, generator=draw),
        "old_per_token_logps": old,
        "ref_per_token_logps": (old - 0.1) * mask,
        "rewards": torch.ones(rows),
        "scored": torch.ones(rows, dtype=torch.bool),
        "num_items_in_batch": mask.sum(),
        "totals": Totals.of(mask),
    }


def timed(owner: Any, batches: list[dict[str, Any]]) -> float:
    """CPU seconds of the losses and gradients of one optimizer step."""
    seconds = 0.0
    for number, batch in enumerate(batches):
        mask = batch["loss_mask"].float()
        leaf, entropies = ((batch["old_per_token_logps"] + 0.05) * mask).requires_grad_(), mask
        if isinstance(owner, VariantTrainer):
            # A layout stands for values that are 0 where nothing counts, as those of a forward are.
            owner._passes.forward = lambda *_, **__: Scored(leaf * 1.0, entropies, None, LAYOUT)  # noqa: B023
        else:
            owner._get_per_token_logps_and_entropies = lambda *_, **__: (leaf * 1.0, entropies, None)  # noqa: B023
        owner.accelerator.gradient_state._set_sync_gradients(number == len(batches) - 1)
        begin = time.process_time()
        owner._compute_loss(owner.model, dict(batch)).backward()
        seconds += time.process_time() - begin
    return seconds


def step(rows: int, kind: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The 8 micro-batches of an optimizer step, as they are cut here and as stock has them."""
    drawn = lengths(kind, MICRO_BATCHES * rows)
    stock = [inputs(drawn[i : i + rows], max(drawn)) for i in range(0, len(drawn), rows)]
    cut = plain_cut([4] * len(drawn), drawn, MICRO_BATCHES, largest=rows * (max(drawn) + 4))
    parts = [[drawn[row] for row in part] for part in cut.parts]
    return [inputs(part, max(part)) for part in parts], stock


def main() -> None:
    quiet()
    print("objective  rows of a micro-batch, lengths   ours / stock        target 1.0")
    with tempfile.TemporaryDirectory() as folder:
        for variant, settings in CASES.items():
            ours, stock = trainer(folder, variant), trainer(folder, None, **settings)
            for rows, kind in SIZES:
                batches = dict(zip((ours, stock), step(rows, kind), strict=True))
                times: dict[Any, list[float]] = {ours: [], stock: []}
                for _ in range(TURNS):
                    for owner, seconds in times.items():
                        seconds.append(timed(owner, batches[owner]))
                print(f"{variant:9}  {rows:4}  {kind:25}  {ratio(times[ours][5:], times[stock][5:])}", flush=True)


if __name__ == "__main__":
    main()
