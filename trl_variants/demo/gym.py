"""Tasks of reasoning-gym, scored by its own scorers, for a model that can read."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal, InvalidOperation
from typing import Any

from trl_variants.demo.task import Prompt, Question, Task
from trl_variants.errors import VariantError, did_you_mean, listing

__all__ = ["extract_answer", "make_task"]

TRAIN, HELD_OUT = 256, 64
MIN_QUESTIONS = 16
#: Settings over a task's own defaults, so that a model of 135 million parameters is right now and then.
EASIER: Mapping[str, Mapping[str, Any]] = {"chain_sum": {"max_terms": 2, "max_digits": 1}}
#: Tokens of a completion; the answers of most tasks are short.
MAX_COMPLETION_LENGTH: Mapping[str, int] = {"chain_sum": 24}
DEFAULT_MAX_COMPLETION_LENGTH = 64
INSTRUCTION = "Give only the final answer."

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_STATED = re.compile(r"\banswer(?:\s+is|\s*:)\s*:?\s*(.+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def make_task(
    name: str, *, seed: int, config: Mapping[str, Any] | None = None, max_length: int | None = None, chat: bool = True
) -> Task:
    """Questions of one reasoning-gym task, split by their text.

    Args:
        name: Name of the task in reasoning-gym, such as ``chain_sum``.
        seed: Seed of the questions.
        config: Settings of the task, over its own defaults.
        max_length: Tokens of a completion; chosen by the task when None.
        chat: Whether the model has a chat template.

    Returns:
        The task; fewer questions than usual where the task has few different ones.

    Raises:
        VariantError: The package is missing, or the task or one of its settings is unknown.
    """
    dataset = _make_dataset(name, seed, {**EASIER.get(name, {}), **(config or {})})
    entries: dict[str, dict[str, Any]] = {}
    for index in range(len(dataset)):
        entry = dataset[index]
        entries.setdefault(entry["question"], entry)
        if len(entries) == TRAIN + HELD_OUT:
            break
    if len(entries) < MIN_QUESTIONS:
        raise VariantError(f"task '{name}' has only {len(entries)} different questions, too few to train and test on.")
    unique = list(entries.values())
    numeric = all(_is_number(entry["answer"]) for entry in unique)
    questions = tuple(
        Question(str(entry["question"]), _prompt(entry["question"], chat), str(entry["answer"]), index)
        for index, entry in enumerate(unique)
    )
    held_out = min(HELD_OUT, len(questions) // 3)

    def score(question: Question, completion: str) -> float:
        answer = extract_answer(completion, numeric=numeric)
        try:
            return float(dataset.score_answer(answer, unique[question.index]))
        except Exception:  # some scorers parse the answer and fail on anything else
            return 0.0

    return Task(
        name=name,
        about=f"reasoning-gym's {name}",
        train=questions[held_out:],
        held_out=questions[:held_out],
        score=score,
        max_completion_length=max_length or MAX_COMPLETION_LENGTH.get(name, DEFAULT_MAX_COMPLETION_LENGTH),
    )


def extract_answer(completion: str, *, numeric: bool) -> str:
    """The answer inside a completion: tagged, boxed, announced, or else what is left without its wrapping.

    A scorer gives part of the credit for an answer with words around it, which is not what should be learned.

    Args:
        completion: What the model wrote.
        numeric: Whether every answer of the task is a number; then the last number counts.

    Returns:
        The answer, perhaps empty.

    Example:
        >>> extract_answer("The sum of 3 and 4 is 7.", numeric=True)
        '7'
        >>> extract_answer("I think <answer> blue </answer>, as asked.", numeric=False)
        'blue'
        >>> extract_answer("The final answer is: **blue**.", numeric=False)
        'blue'
    """
    text = completion
    for pattern in (_TAG, _BOXED, _STATED):
        found = pattern.findall(text)
        if found:
            text = found[-1]
            break
    if numeric:
        return _last_number(text)
    text = text.strip().strip("*`\"'$ ")
    return text.removesuffix(".").strip("*`\"'$ ")


def _last_number(text: str) -> str:
    found = list(_NUMBER.finditer(text))
    if not found:
        return ""
    # A minus sign belongs to the number unless it follows an operand: "5 - 3" ends in 3, "= -3" in -3.
    before = text[: found[-1].start()].rstrip()
    negative = before.endswith("-") and not re.search(r"[\d)]\s*-$", before)
    return "-" * negative + found[-1].group()


def _make_dataset(name: str, seed: int, config: Mapping[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise VariantError(
            f"task '{name}' needs the package reasoning-gym: pip install 'trl-variants[demo]'."
        ) from error
    if name not in DATASETS:
        raise VariantError(
            f"No reasoning-gym task named '{name}'.{did_you_mean(name, DATASETS)} Tasks: {listing(sorted(DATASETS))}."
        )
    dataset_class, config_class = DATASETS[name]
    known = [field.name for field in fields(config_class) if field.name not in ("seed", "size")]
    for key in config:
        if key not in known:
            raise VariantError(
                f"task '{name}' has no setting '{key}'.{did_you_mean(key, known)} It has: {listing(known)}."
            )
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some tasks print while they are made
            # Questions of neighbouring seeds overlap, so the seeds of two runs are put far apart.
            settings = config_class(seed=seed * 1_000_003, size=4 * (TRAIN + HELD_OUT), **config)
            settings.validate()
            return dataset_class(settings)
    except Exception as error:
        raise VariantError(f"task '{name}' cannot be made with {dict(config) or 'its defaults'}: {error}") from error


def _prompt(question: str, chat: bool) -> Prompt:
    if chat:
        return [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}]
    return f"Question: {question}\n{INSTRUCTION}\nAnswer:"


def _is_number(answer: Any) -> bool:
    try:
        return Decimal(str(answer).replace(",", "")).is_finite()
    except InvalidOperation:
        return False
