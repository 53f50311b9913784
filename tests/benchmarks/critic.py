"""What a critic adds to an optimizer step: the learning phase of PPO against GRPO's on the same rows, in CPU time.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.critic

All trainers run in one process, by turns. Generation and scoring are left out: every rollout is used for several steps,
and its first step does not count.
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
    rollout,
    silent,
    tokenizer,
)

import tempfile
from typing import Any

from trl_variants import VariantConfig, VariantTrainer

STEPS, TURNS = 6, 4
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "grpo": ("grpo", {}, 1.0),
    "ppo, shared critic": ("ppo", {"critic": "shared"}, 1.15),
    "ppo, separate critic": ("ppo", {"critic": "separate"}, 2.2),
}


def step_times(variant: str, overrides: dict[str, Any], folder: str) -> list[float]:
    """CPU seconds of the steps on one rollout, but for the first."""
    clock = Clock()
    trainer = VariantTrainer(
        model=model(),
        reward_funcs=reward,
        args=VariantConfig(
            output_dir=folder,
            variant=variant,
            variant_overrides=overrides,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            num_iterations=STEPS,
            max_steps=STEPS,
            max_completion_length=512,
            **SETTINGS,
        ),
        train_dataset=prompts(32),
        processing_class=tokenizer(),
        rollout_func=rollout("equal"),
        callbacks=[clock],
    )
    silent(trainer).train()
    return clock.steps[1:]


def main() -> None:
    quiet()
    times: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TURNS):
            for name, (variant, overrides, _) in CASES.items():
                times[name] += step_times(variant, overrides, folder)
    print("                        x grpo             target")
    for name, (_, _, target) in CASES.items():
        print(f"{name:22}  {ratio(times[name], times['grpo']):18} {target}")


if __name__ == "__main__":
    main()
