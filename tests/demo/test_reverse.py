"""The default task, its tokenizer and its model."""

from __future__ import annotations

import pytest
import torch

from trl_variants.demo import reverse
from trl_variants.demo.evaluation import evaluate


@pytest.fixture(scope="module")
def tokenizer():
    return reverse.make_tokenizer()


def test_every_string_is_there_once_and_none_is_both_trained_on_and_held_out():
    task = reverse.make_task(seed=1)
    train, held_out = ({question.text for question in part} for part in (task.train, task.held_out))
    assert (len(task.train), len(task.held_out)) == (384, 128)
    assert (len(train), len(held_out)) == (384, 128)
    assert not train & held_out
    assert train | held_out == {a + b + c for a in "abcdefgh" for b in "abcdefgh" for c in "abcdefgh"}


def test_the_split_depends_on_the_seed():
    assert reverse.make_task(0).held_out == reverse.make_task(0).held_out
    assert reverse.make_task(0).held_out != reverse.make_task(1).held_out


@pytest.mark.parametrize(
    ("completion", "score"), [("cba", 1.0), ("abc", 0.0), ("cb", 0.0), ("cbaa", 0.0), (" cba", 0.0), ("", 0.0)]
)
def test_only_the_exact_answer_scores(completion, score):
    task = reverse.make_task(0)
    (question,) = (q for q in task.train + task.held_out if q.text == "abc")
    assert question.answer == "cba"
    assert task.score(question, completion) == score


def test_a_character_is_a_token_and_padding_is_on_the_left(tokenizer):
    ids = tokenizer(["abc=", "a="], padding=True, return_tensors="pt")["input_ids"]
    assert ids.shape == (2, 4)
    assert ids[1].tolist() == [tokenizer.pad_token_id, tokenizer.pad_token_id, *ids[0, [0, 3]].tolist()]
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "abc="


def test_the_model_is_small_and_its_weights_depend_on_the_seed_alone(tokenizer):
    torch.manual_seed(5)
    one = reverse.make_model(tokenizer, seed=3)
    torch.manual_seed(6)
    state = torch.get_rng_state()
    two = reverse.make_model(tokenizer, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert 100_000 < sum(p.numel() for p in one.parameters()) < 130_000
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = reverse.make_model(tokenizer, seed=4)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_the_warm_up_leaves_the_model_right_now_and_then(tokenizer):
    task = reverse.make_task(0)
    model = reverse.make_model(tokenizer, 0)
    untrained = evaluate(model, tokenizer, task, seed=0, samples_per_question=2, batch_size=128, bf16=False)
    reverse.warm_up(model, tokenizer, task, seed=0)
    warm = evaluate(model, tokenizer, task, seed=0, samples_per_question=2, batch_size=128, bf16=False)
    assert untrained.sampled == 0.0
    assert 0.01 < warm.sampled < 0.15
    assert all(p.grad is None for p in model.parameters())
