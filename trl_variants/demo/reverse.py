"""The default task and its model: a small character-level transformer learns to reverse strings of three letters."""

from __future__ import annotations

import itertools
import random
from typing import Any

from trl_variants.demo.task import Question, Task

__all__ = ["make_model", "make_task", "make_tokenizer", "warm_up"]

LETTERS = "abcdefgh"
LENGTH = 3
HELD_OUT = 128
#: Ends a prompt; what follows is the completion.
SEPARATOR = "="
#: Four tokens are needed (three letters and the end); room for as many again lets the model learn to stop.
MAX_COMPLETION_LENGTH = 8
#: Enough for a right answer now and then, which RL needs to begin with; more would leave RL little to show.
WARM_UP_STEPS = 18
WARM_UP_BATCH = 64
WARM_UP_LEARNING_RATE = 3e-3
#: Three times what Llama has, which is made for wider layers: with 0.02 three seeds of four stayed below 0.7.
INITIALIZER_RANGE = 0.06


def make_task(seed: int, max_length: int | None = None) -> Task:
    """All 512 strings, 128 of them held out.

    Example:
        >>> task = make_task(seed=0)
        >>> len(task.train), len(task.held_out), len({q.text for q in task.train + task.held_out})
        (384, 128, 512)
    """
    strings = ["".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH)]
    random.Random(seed).shuffle(strings)
    questions = tuple(Question(s, s + SEPARATOR, s[::-1], index) for index, s in enumerate(strings))
    return Task(
        name="reverse",
        about=f"reverse strings of {LENGTH} letters out of {len(LETTERS)}",
        train=questions[HELD_OUT:],
        held_out=questions[:HELD_OUT],
        score=exact_match,
        max_completion_length=max_length or MAX_COMPLETION_LENGTH,
    )


def exact_match(question: Question, completion: str) -> float:
    """1 for exactly the answer and nothing after it, else 0."""
    return float(completion == question.answer)


def make_tokenizer() -> Any:
    """One token per character; padding on the left, as generation needs it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", "<unk>", *LETTERS, SEPARATOR))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=32,
    )


def make_model(tokenizer: Any, seed: int) -> Any:
    """A Llama of two layers with fresh weights, about 114 thousand parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=208,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def warm_up(model: Any, tokenizer: Any, task: Task, seed: int, steps: int = WARM_UP_STEPS) -> None:
    """A few supervised steps on the training strings, so that some samples are right and RL can begin."""
    import torch

    texts = [f"{question.prompt}{question.answer}{tokenizer.eos_token}" for question in task.train]
    tokens = tokenizer(texts, return_tensors="pt")["input_ids"]  # all of one length, so nothing is padded
    labels = tokens.clone()
    labels[:, : LENGTH + len(SEPARATOR)] = -100  # only the answer is learned
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(tokens), (WARM_UP_BATCH,), generator=generator)
        optimizer.zero_grad()
        model(input_ids=tokens[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    model.eval()
