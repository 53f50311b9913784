"""Exact answers on held-out questions, sampled and greedy."""

from __future__ import annotations

from typing import Any

from trl_variants.demo.settings import Evaluation, Sample
from trl_variants.demo.task import Task

__all__ = ["evaluate", "is_right"]


def is_right(score: float) -> bool:
    """Whether a score is the full one; part of the credit is not a right answer."""
    return score > 1 - 1e-6


def evaluate(
    model: Any,
    tokenizer: Any,
    task: Task,
    *,
    seed: int,
    samples_per_question: int,
    batch_size: int,
    bf16: bool,
    shown: int = 6,
) -> Evaluation:
    """Answer every held-out question, sampled ``samples_per_question`` times and greedily once.

    Args:
        model: The model; it is left in the mode it was in, and so is torch's random state.
        tokenizer: Its tokenizer, padding on the left.
        task: Questions and score.
        seed: Seed of the samples.
        samples_per_question: More of them make ``sampled`` more exact.
        batch_size: Completions generated at once.
        bf16: Whether to generate under bfloat16 autocast.
        shown: How many sampled completions to keep.

    Returns:
        The shares of right answers, and a few completions.
    """
    import torch

    questions = list(task.held_out)
    mode = model.training
    model.eval()
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            sampled = [
                _complete(model, tokenizer, task, batch_size=batch_size, bf16=bf16, sample=True)
                for _ in range(samples_per_question)
            ]
            greedy = _complete(model, tokenizer, task, batch_size=batch_size, bf16=bf16, sample=False)
    finally:
        model.train(mode)

    def share(completions: list[str]) -> float:
        right = [is_right(task.score(question, text)) for question, text in zip(questions, completions, strict=True)]
        return sum(right) / len(right)

    samples = tuple(
        Sample(question.text, question.answer, text, is_right(task.score(question, text)))
        for question, text in list(zip(questions, sampled[0], strict=True))[:shown]
    )
    return Evaluation(
        sampled=sum(map(share, sampled)) / len(sampled),
        greedy=share(greedy),
        samples=samples,
    )


def _complete(model: Any, tokenizer: Any, task: Task, *, batch_size: int, bf16: bool, sample: bool) -> list[str]:
    import torch
    from transformers import GenerationConfig

    # The stop tokens of the model's own configuration, as TRL uses them when it generates.
    generation = GenerationConfig(
        max_new_tokens=task.max_completion_length,
        do_sample=sample,
        temperature=1.0 if sample else None,
        top_k=0 if sample else None,
        top_p=1.0 if sample else None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=model.generation_config.eos_token_id,
    )
    texts: list[str] = []
    prompts = [question.prompt for question in task.held_out]
    for start in range(0, len(prompts), batch_size):
        inputs = _tokenize(tokenizer, prompts[start : start + batch_size]).to(model.device)
        with torch.no_grad(), torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):
            tokens = model.generate(**inputs, generation_config=generation)
        completions = tokens[:, inputs["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(completions, skip_special_tokens=True)
    return texts


def _tokenize(tokenizer: Any, prompts: list[Any]) -> Any:
    options = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
    if isinstance(prompts[0], str):
        inputs = tokenizer(prompts, **options)
    else:
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **options
        )
    inputs.pop("token_type_ids", None)
    return inputs
