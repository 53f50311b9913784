"""The learning phase of TRL's GRPOTrainer and of VariantTrainer, on the same recorded rollouts.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.learning [--quick]

Both train by turns in one process. What is timed is process CPU time of the optimizer steps that follow the first one
of a rollout, so that generation and scoring are left out. The learning rate is 0: every step has the same loss and
gradient norm, and both must be stock's. "Ideal" computes every distinct prompt token and every completion token once,
in units of what stock computes.
"""

from __future__ import annotations

from tests.benchmarks.common import (  # isort: skip (sets the environment)
    GENERATIONS,
    SETTINGS,
    Clock,
    lengths,
    model,
    prompts,
    quiet,
    ratio,
    reward,
    rollout,
    silent,
    tokenizer,
)

import argparse
import math
import tempfile
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from trl_variants import VariantConfig, VariantTrainer

STEPS = 3


@dataclass
class Run:
    """What one trainer gave over its turns."""

    seconds: list[float] = field(default_factory=list)
    loss: float = math.nan
    norm: float = math.nan

    def add(self, trainer: Any, clock: Clock) -> None:
        self.seconds += clock.steps[1:]
        entry = [log for log in trainer.state.log_history if "loss" in log][-1]
        self.loss, self.norm = entry["loss"], entry["grad_norm"]


def train(kind: str, prompt: int, size: int, parts: int, folder: str, *, variant: str | None, **extra: Any) -> Any:
    """Train on one rollout; stock where there is no variant."""
    clock = Clock()
    shared = {
        "output_dir": folder,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": parts,
        "num_iterations": STEPS,
        "max_steps": STEPS,
        "max_completion_length": 512,
        **SETTINGS,
    }
    args = (
        GRPOConfig(loss_type="dapo", beta=0.0, **shared)
        if variant is None
        else VariantConfig(variant=variant, **shared, **extra)
    )
    trainer = (GRPOTrainer if variant is None else VariantTrainer)(
        model=model(),
        reward_funcs=reward,
        args=args,
        train_dataset=prompts(prompt),
        processing_class=tokenizer(),
        rollout_func=rollout(kind),
        callbacks=[clock],
    )
    silent(trainer).train()
    return trainer, clock


def ideal(kind: str, prompt: int, rows: int) -> float:
    """Tokens that must be computed, as a share of those that stock computes."""
    completions = lengths(kind, rows)
    return (prompt * rows / GENERATIONS + sum(completions)) / (rows * (prompt + max(completions)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="only the cases that have a target")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    quiet()
    targets = {("long", 16, 4, 8): 0.30, ("long", 512, 8, 4): 0.30, ("equal", 16, 4, 8): 1.05}
    cases = list(targets)
    if not options.quick:
        cases = [
            (k, p, s, n) for k in ("equal", "uniform", "long") for p in (16, 128, 512) for s, n in ((4, 8), (8, 4))
        ]
    print("lengths   prompt  rows x micro-batches   ours / stock         ideal  target  loss        gradient norm")
    for kind, prompt, size, parts in cases:
        runs = {None: Run(), "trl_dapo": Run()}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(options.turns):
                for variant, run in runs.items():
                    run.add(*train(kind, prompt, size, parts, folder, variant=variant))
        stock, ours = runs[None], runs["trl_dapo"]
        target = targets.get((kind, prompt, size, parts))
        print(
            f"{kind:8}  {prompt:6}  {size} x {parts:<18}  {ratio(ours.seconds, stock.seconds):18}  "
            f"{ideal(kind, prompt, size * parts):.2f}   {target or '':<6}  {abs(ours.loss - stock.loss):.1e}     "
            f"{abs(ours.norm / stock.norm - 1):.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
