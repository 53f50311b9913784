"""What a critic adds to an optimizer step: the learning phase of PPO against GRPO's on the same rows, in CPU time.

    OMP_NUM_THREADS=1 python docs/benchmarks/critic_cost.py

All trainers run in one process, by turns; a figure is the median over the steps of all turns, and what counts is their
ratio. Generation and scoring are left out: every rollout is used for several steps, and its first step does not count.
"""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from trl_variants import VariantConfig, VariantTrainer

ROWS, PROMPT, COMPLETION, VOCABULARY = 8, 32, 96, 4096
STEPS, TURNS = 6, 4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "ppo, shared critic": ("ppo", {"critic": "shared"}),
    "ppo, separate critic": ("ppo", {"critic": "separate"}),
}


class Clock(TrainerCallback):
    """CPU time of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.process_time() - self._begin)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    model = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def policy() -> LlamaForCausalLM:
    """5.8 million parameters."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that are no model's: what is timed is learning, on the same rows in every case."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (len(prompts), COMPLETION), generator=draw).tolist()
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": None,
    }


def step_times(variant: str, overrides: dict[str, Any], folder: str) -> list[float]:
    """CPU seconds of the steps on one rollout, but for the first."""
    clock = Clock()
    trainer = VariantTrainer(
        model=policy(),
        reward_funcs=lambda completion_ids, **_: [float(ids[0] % 2) for ids in completion_ids],
        args=VariantConfig(
            output_dir=folder,
            variant=variant,
            variant_overrides=overrides,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=1,
            num_generations=4,
            num_iterations=STEPS,
            max_steps=STEPS,
            max_completion_length=COMPLETION,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [" ".join(f"w{2 + i + j}" for j in range(PROMPT)) for i in range(8)]}
        ),
        processing_class=tokenizer(),
        rollout_func=rollout,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock.steps[1:]


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TURNS):
            for name, (variant, overrides) in CASES.items():
                times[name] += step_times(variant, overrides, folder)
    base = statistics.median(times["grpo"])
    for name, steps in times.items():
        middle = statistics.median(steps)
        print(f"{name:22} {middle:.3f} s   {middle / base:.2f} x grpo   ({len(steps)} steps)")


if __name__ == "__main__":
    main()
