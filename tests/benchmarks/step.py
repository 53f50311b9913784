"""A whole optimizer step, generation by transformers included: TRL's GRPOTrainer and VariantTrainer by turns.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.step

32 completions of 64 sampled tokens in 4 micro-batches; process CPU time of each step.
"""

from __future__ import annotations

from tests.benchmarks.common import (  # isort: skip (sets the environment)
    SETTINGS,
    Clock,
    model,
    prompts,
    quiet,
    ratio,
    reward,
    silent,
    tokenizer,
)

import tempfile
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from trl_variants import VariantConfig, VariantTrainer

STEPS, TURNS, NEW = 2, 2, 64


def step_times(prompt: int, folder: str, variant: str | None) -> list[float]:
    """CPU seconds of each step; stock where there is no variant."""
    clock = Clock()
    shared: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "max_steps": STEPS,
        "max_completion_length": NEW,
        **SETTINGS,
    }
    stock = variant is None
    trainer = (GRPOTrainer if stock else VariantTrainer)(
        model=model(),
        reward_funcs=reward,
        args=GRPOConfig(loss_type="dapo", beta=0.0, **shared) if stock else VariantConfig(variant=variant, **shared),
        train_dataset=prompts(prompt),
        processing_class=tokenizer(),
        callbacks=[clock],
    )
    silent(trainer).train()
    return clock.steps


def main() -> None:
    quiet()
    print("prompt  new tokens   ours / stock")
    for prompt in (16, 128, 512):
        times: dict[str | None, list[float]] = {None: [], "trl_dapo": []}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(TURNS):
                for variant, seconds in times.items():
                    seconds += step_times(prompt, folder, variant)
        print(f"{prompt:6}  {NEW:10}   {ratio(times['trl_dapo'], times[None])}", flush=True)


if __name__ == "__main__":
    main()
