"""Tasks of reasoning-gym: the answer is extracted, their own scorers score it, and nothing is fetched."""

from __future__ import annotations

import pytest

from trl_variants import VariantError
from trl_variants.demo import gym
from trl_variants.demo.evaluation import is_right


@pytest.fixture(scope="module")
def chain_sum():
    return gym.make_task("chain_sum", seed=0)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        (" -7\n", "-7"),
        ("The answer is 7.", "7"),
        ("3 + 4 = 7", "7"),
        ("5 - 3", "3"),
        ("5-3", "3"),
        ("(1+4) - 3", "3"),
        ("0 - 4 = -4", "-4"),
        ("0 - 4 = - 4", "-4"),
        ("It is 1,234.50 exactly", "1234.50"),
        ("<answer>12</answer> and 13 more", "12"),
        ("so \\boxed{12}, not 13", "12"),
        ("The answer is 12.\nThe end of 13.", "12"),
        ("no idea", ""),
        ("", ""),
    ],
)
def test_the_last_number_is_the_answer_where_answers_are_numbers(completion, answer):
    assert gym.extract_answer(completion, numeric=True).replace(",", "") == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("blue", "blue"),
        ("Blue sky.", "Blue sky"),
        ("Answer: **blue**", "blue"),
        ("The final answer is: 'blue'.", "blue"),
        ("<answer>\n1 2\n3 4\n</answer>", "1 2\n3 4"),
        ("<answer>no</answer> wait <answer>yes</answer>", "yes"),
    ],
)
def test_wrapping_is_taken_off_other_answers(completion, answer):
    assert gym.extract_answer(completion, numeric=False) == answer


def test_the_own_scorer_scores_what_was_extracted(chain_sum):
    question = next(q for q in chain_sum.train if q.answer == "7")
    assert chain_sum.score(question, "7") == 1.0
    assert chain_sum.score(question, "The result of the sum is 07.00, of course") == 1.0
    assert chain_sum.score(question, "8") == 0.0
    # The scorer gives half the credit for 17, which contains 7: it may be rewarded, but it is not right.
    assert chain_sum.score(question, "17") == 0.5
    assert not is_right(chain_sum.score(question, "17"))


def test_every_expected_answer_scores_fully(chain_sum):
    for question in chain_sum.train + chain_sum.held_out:
        assert is_right(chain_sum.score(question, question.answer))


def test_no_question_is_both_trained_on_and_held_out(chain_sum):
    train, held_out = ({question.text for question in part} for part in (chain_sum.train, chain_sum.held_out))
    assert not train & held_out
    assert len(train) == len(chain_sum.train) > 100
    assert len(held_out) == len(chain_sum.held_out) == 64


def test_questions_depend_on_the_seed_alone(chain_sum):
    again = gym.make_task("chain_sum", seed=0)
    assert (again.train, again.held_out) == (chain_sum.train, chain_sum.held_out)
    assert gym.make_task("chain_sum", seed=1).held_out != chain_sum.held_out


def test_a_model_with_a_chat_template_gets_a_conversation_and_another_one_text(chain_sum):
    (message,) = chain_sum.train[0].prompt
    assert message["role"] == "user"
    assert message["content"].startswith(chain_sum.train[0].text)
    plain = gym.make_task("chain_sum", seed=0, chat=False).train[0]
    assert plain.text == chain_sum.train[0].text
    assert plain.prompt.startswith("Question: ") and plain.prompt.endswith("Answer:")


def test_settings_of_a_task_win_over_the_easier_ones():
    hard = gym.make_task("chain_sum", seed=0, config={"min_terms": 4, "max_terms": 4}, max_length=7)
    assert all(sum(question.text.count(sign) for sign in "+-") == 3 for question in hard.train)
    assert hard.max_completion_length == 7


def test_a_scorer_that_fails_on_an_answer_gives_no_score():
    task = gym.make_task("prime_factorization", seed=0)
    assert task.score(task.train[0], "words") == 0.0
    assert is_right(task.score(task.train[0], task.train[0].answer))


@pytest.mark.parametrize("name", ["letter_counting", "spell_backward", "simple_equations", "number_sorting"])
def test_other_tasks_work_offline_with_their_own_defaults(name):
    task = gym.make_task(name, seed=0)
    right = [is_right(task.score(question, f"<answer>{question.answer}</answer>")) for question in task.held_out]
    assert all(right)
    assert not any(is_right(task.score(question, "I do not know")) for question in task.held_out)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("chain_sums", {}, "No reasoning-gym task named 'chain_sums'. Did you mean 'chain_sum'? Tasks: ab, acre, "),
        (
            "chain_sum",
            {"max_term": 3},
            "task 'chain_sum' has no setting 'max_term'. Did you mean 'max_terms'? It has: min_terms, max_terms, ",
        ),
        (
            "chain_sum",
            {"min_terms": 9},
            "task 'chain_sum' cannot be made with {'max_terms': 2, 'max_digits': 1, 'min_terms': 9}: max_terms must be",
        ),
        ("composite", {}, "task 'composite' cannot be made with its defaults: Must specify at least one dataset"),
        (
            "chain_sum",
            {"max_terms": 1, "min_terms": 1, "max_digits": 1},
            "task 'chain_sum' has only 10 different questions, too few to train and test on.",
        ),
    ],
)
def test_what_is_wrong_with_a_task_is_said(name, config, message):
    with pytest.raises(VariantError) as error:
        gym.make_task(name, seed=0, config=config)
    assert str(error.value).startswith(message)
