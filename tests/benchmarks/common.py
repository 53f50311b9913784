"""What the benchmarks share: a model of 6.6 million parameters built on the spot, prompts, completions and a clock."""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}

import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback

VOCABULARY = 4096
GENERATIONS = 8


def quiet() -> None:
    """One thread, and no warnings."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    model = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def model() -> Qwen2ForCausalLM:
    """Qwen2 with 7 layers of 256: 6.6 million parameters, a sixth of them of the vocabulary of 4096."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def prompts(tokens: int, count: int = 64) -> Dataset:
    """Distinct prompts of one length."""
    return Dataset.from_dict({"prompt": [" ".join(f"w{2 + i + 3 * j}" for j in range(tokens)) for i in range(count)]})


def lengths(kind: str, count: int, seed: int = 0) -> list[int]:
    """Lengths of completions: equal, uniform or long-tailed (log-normal, with a median of 55 tokens)."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "equal":
        return [96] * count
    if kind == "uniform":
        return torch.randint(8, 185, (count,), generator=draw).tolist()
    return torch.exp(torch.randn(count, generator=draw) * 0.9 + 4.0).clamp(4, 512).long().tolist()


def rollout(kind: str) -> Any:
    """Recorded completions in place of generation: the same for the same prompt and number, whoever asks."""

    def write(asked: list[str], trainer: Any) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(1)
        rows = [torch.randint(2, VOCABULARY, (n,), generator=draw).tolist() for n in lengths(kind, len(asked))]
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in asked]
        return {"prompt_ids": ids, "completion_ids": rows, "logprobs": None}

    return write


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0] % 2) for ids in completion_ids]


class Clock(TrainerCallback):
    """CPU time of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.process_time() - self._begin)


SETTINGS: dict[str, Any] = {
    "num_generations": GENERATIONS,
    "learning_rate": 0.0,
    "max_grad_norm": 1e9,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "seed": 1,
}


def silent(trainer: Any) -> Any:
    """A trainer that prints nothing."""
    trainer.remove_callback(PrinterCallback)
    return trainer


def ratio(ours: Sequence[float], stock: Sequence[float]) -> str:
    """Ratio of medians, with the least and largest ratio of a turn to the stock's median."""
    base = statistics.median(stock)
    return f"{statistics.median(ours) / base:.2f} ({min(ours) / base:.2f}-{max(ours) / base:.2f})"
