"""Three steps of training from a config, with a model, data and reward made up on the spot: no hub, no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["few_words", "low_words", "train_config"]

_WORDS = [f"w{i}" for i in range(29)]
#: What a test's machine and size need, whatever the config says.
_SIZES = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "max_completion_length": 6,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
}


def train_config(
    config: str | Path, folder: str | Path, *, steps: int = 3, plugins: Sequence[str] = (), **settings: Any
) -> list[dict[str, float]]:
    """Train a YAML file for a few steps as ``trl-variants train`` does, on a made-up model, dataset and reward.

    Args:
        config: The file. Its model, dataset, reward, lengths and batch sizes are replaced; its variant is trained.
        folder: An empty folder, for the model, the data and the output (``folder/out``).
        steps: Optimizer steps.
        plugins: Modules or files to load that are not installed; ``variant_plugins`` in a config.
        **settings: Any other setting; it wins over the file and over what is replaced.

    Returns:
        What the trainer logged, step by step.

    Raises:
        VariantError: The config is not valid.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     log = train_config("configs/grpo.yaml", folder)
    """
    import yaml
    from transformers.trainer_utils import set_seed

    from trl_variants.trainer.launch import parse, run

    folder = Path(folder)
    said = yaml.safe_load(Path(config).read_text())
    generations = settings.get("num_generations", said.get("num_generations") or 1)
    replaced = {
        "steps_per_generation": 2 * -(-generations // 8),  # rollouts of two groups, or of 16 prompts
        **_SIZES,
        "model_name_or_path": _model(folder / "model"),
        "dataset_name": _dataset(folder / "data"),
        "reward_funcs": [f"{__name__}.{_REWARDS[i % 2]}" for i in range(len(said.get("reward_funcs") or [1]))],
        "output_dir": str(folder / "out"),
        "max_steps": steps,
        **({"variant_plugins": list(plugins)} if plugins else {}),
        **settings,
    }
    line = ["--config", str(config)]
    for key, value in replaced.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        line += [f"--{key}", *(json.dumps(v) if isinstance(v, (dict, bool)) else str(v) for v in values)]
    job = parse(line)
    set_seed(job.training.seed)
    return [entry for entry in run(job).state.log_history if "loss" in entry]


#: In the place of the rewards of a config, by turns.
_REWARDS = ("low_words", "few_words")


def low_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A dense reward: the share of tokens from the first half of the vocabulary."""
    return [sum(token < 16 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def few_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that knows lengths only."""
    return [-len(ids) / 8 for ids in completion_ids]


def _model(folder: Path) -> str:
    """A two-layer model and its tokenizer, one token a word, in a folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{word: i + 3 for i, word in enumerate(_WORDS)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data.mul_(4.0)  # as drawn, every word would be equally likely
    model.save_pretrained(folder)
    return str(folder)


def _dataset(folder: Path, rows: int = 32) -> str:
    """Prompts of two words in a folder that `datasets.load_dataset` takes, with the splits train and test."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [{"prompt": f"{_WORDS[i % 29]} {_WORDS[(7 * i + 3) % 29]}", "number": i} for i in range(rows)]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return str(folder)
