"""Tiny models, tokenizers and datasets, built on the spot: no hub, no network."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trl_variants import VariantConfig

WORDS = [f"w{i}" for i in range(29)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; <pad> 0, <eos> 1, <unk> 2."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{word: i + 3 for i, word in enumerate(WORDS)}}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model(seed: int = 0, scale: float = 4.0, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    """A two-layer model whose weights are scaled up, so that its entropy is not maximal."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    built = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return built.to(dtype)


def saved(folder: Any, **kwargs: Any) -> str:
    """The model and its tokenizer in a folder, for what loads by path."""
    model(**kwargs).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def llama_folder(folder: Any) -> str:
    """A tiny model that loads with its tokenizer from a folder, as the command line does it."""
    return _saved_llama(folder, LlamaForCausalLM)


def judge_folder(folder: Any) -> str:
    """A reward model with the same tokenizer."""
    return _saved_llama(folder, LlamaForSequenceClassification, num_labels=1)


def _saved_llama(folder: Any, kind: Any, **settings: Any) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **settings,
    )
    kind(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def dataset_folder(folder: Any, rows: int = 16) -> str:
    """The dataset in a folder that `datasets.load_dataset` takes, with the splits train and test."""
    for split in ("train", "test"):
        dataset(rows).to_json(f"{folder}/{split}.jsonl")
    return str(folder)


def dataset(rows: int = 16) -> Dataset:
    """Prompts of two words, and a column that reward functions may use."""
    return Dataset.from_dict(
        {
            "prompt": [f"{WORDS[i % 29]} {WORDS[(7 * i + 3) % 29]}" for i in range(rows)],
            "number": list(range(rows)),
        }
    )


def low_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A dense reward: the share of tokens from the first half of the vocabulary."""
    return [sum(token < 16 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that knows lengths only."""
    return [len(ids) / 8 for ids in completion_ids]


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_steps": 3,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "seed": 3,
}


def config(folder: Any, variant: Any = "grpo", **settings: Any) -> VariantConfig:
    """A configuration for a tiny run."""
    merged = {**SETTINGS, "num_generations": 4, **settings}
    return VariantConfig(output_dir=str(folder), variant=variant, **merged)
