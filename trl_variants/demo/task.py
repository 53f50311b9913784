"""What a task of the demo is: questions to train on, others to be tested on, and a score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Prompt", "Question", "Task"]

#: Plain text, or a conversation for a model with a chat template.
Prompt: TypeAlias = "str | list[dict[str, str]]"


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        text: The question for a reader.
        prompt: The question as the model gets it.
        answer: The expected answer.
        index: Where the task finds what else it knows about the question.
    """

    text: str
    prompt: Prompt
    answer: str
    index: int


@dataclass(frozen=True)
class Task:
    """Questions and how answers to them are scored.

    Attributes:
        name: Name on the command line.
        about: What there is to learn, in a few words.
        train: Questions to train on.
        held_out: Questions to be tested on, none of them in ``train``.
        score: From a question and a completion to a score of at most 1; 1 is right.
        max_completion_length: Tokens that an answer may take.
    """

    name: str
    about: str
    train: tuple[Question, ...]
    held_out: tuple[Question, ...]
    score: Callable[[Question, str], float]
    max_completion_length: int
