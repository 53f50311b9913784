"""The smallest training script: TRL's own, with a variant in the config.

    python examples/train.py --model Qwen/Qwen2.5-0.5B-Instruct --variant dapo --output-dir outputs/train

The model learns to answer in few words; the reward knows nothing but the length.
"""

from __future__ import annotations

import argparse

from datasets import Dataset

from trl_variants import VariantConfig, VariantTrainer

TOPICS = ["rain", "bread", "the moon", "rivers", "chess", "tea", "glass", "maps"]


def brevity(completions, **_):
    """TRL's reward signature: one number a completion, higher for shorter text."""
    return [-len(text) / 100 for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="hub id or folder")
    parser.add_argument("--variant", default="dapo")
    parser.add_argument("--output-dir", default="outputs/train")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--max-completion-length", type=int, default=64)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()

    config = VariantConfig(
        output_dir=options.output_dir,
        variant=options.variant,
        variant_overrides={"regularizer": {"name": "entropy_bonus", "coef": 1e-3}},
        max_completion_length=options.max_completion_length,
        max_steps=options.steps,
        logging_steps=1,
        report_to="none",
        use_cpu=options.cpu,
        bf16=not options.cpu,
    )
    trainer = VariantTrainer(
        model=options.model,
        reward_funcs=brevity,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"Tell me about {topic}." for topic in TOPICS]}),
    )
    trainer.train()
    trainer.save_model(options.output_dir)


if __name__ == "__main__":
    main()
