"""Train several variants on the demo's task with the same seed and budget, and compare them.

python examples/compare_variants.py grpo dr_grpo dapo cispo --steps 100
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from trl_variants.demo import DemoSettings, run_demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=["grpo", "dr_grpo", "dapo", "cispo"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    table = Table(
        "variant", "sampled", "greedy", "reward, last 10 steps", "seconds", title="held-out accuracy after RL"
    )
    for variant in options.variants:
        result = run_demo(DemoSettings(variant=variant, steps=options.steps, seed=options.seed))
        rewards = [step["reward"] for step in result.history[-10:]]
        table.add_row(
            variant,
            f"{result.before.sampled:.2f} -> {result.after.sampled:.2f}",
            f"{result.before.greedy:.2f} -> {result.after.greedy:.2f}",
            f"{sum(rewards) / len(rewards):.2f}",
            f"{result.training_seconds:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
