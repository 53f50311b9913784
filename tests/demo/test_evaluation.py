"""Exact answers are counted, over all samples, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from trl_variants.demo import evaluation, reverse
from trl_variants.demo.evaluation import evaluate, is_right
from trl_variants.demo.task import Question, Task


@pytest.mark.parametrize(("score", "right"), [(1.0, True), (0.99, False), (0.5, False), (0.0, False)])
def test_part_of_the_credit_is_not_a_right_answer(score, right):
    assert is_right(score) is right


def test_sampled_is_the_mean_over_all_samples_and_greedy_is_its_own(monkeypatch):
    questions = tuple(Question(text, text, text, i) for i, text in enumerate("ab"))
    task = Task("copy", "", (), questions, lambda question, text: float(question.answer == text), 1)
    # Two sampled rounds: 2 of 2 right, then 1 of 2, so 3/4; greedy 0 of 2.
    answers = iter([["a", "b"], ["a", "x"], ["x", "x"]])
    monkeypatch.setattr(evaluation, "_complete", lambda *_, **__: next(answers))
    model = torch.nn.Linear(1, 1)
    model.device = torch.device("cpu")
    result = evaluate(model, None, task, seed=0, samples_per_question=2, batch_size=2, bf16=False)
    assert result.sampled == 0.75
    assert result.greedy == 0.0
    assert [(s.question, s.completion, s.right) for s in result.samples] == [("a", "a", True), ("b", "b", True)]


def test_testing_changes_neither_mode_nor_random_state_and_repeats_with_its_seed():
    tokenizer, task = reverse.make_tokenizer(), reverse.make_task(0)
    model = reverse.make_model(tokenizer, 0)
    options = {"samples_per_question": 1, "bf16": False}
    model.train()
    state = torch.get_rng_state()
    first = evaluate(model, tokenizer, task, seed=1, batch_size=128, **options)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert evaluate(model, tokenizer, task, seed=1, batch_size=128, **options) == first
    other = evaluate(model, tokenizer, task, seed=2, batch_size=128, **options)
    assert other.samples != first.samples
    assert evaluate(model, tokenizer, task, seed=1, batch_size=48, **options).greedy == first.greedy
