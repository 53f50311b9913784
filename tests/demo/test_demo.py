"""The demo trains for real: the tiny model learns its task, and learns nothing from noise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from trl_variants import VariantError, resolve
from trl_variants.demo import DemoResult, DemoSettings, Reporter, run_demo
from trl_variants.demo import runner as runner_module

#: A run that is too short to learn anything.
SHORT = {"steps": 2}


class Recorder(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.started_with: dict[str, Any] = {}
        self.results: list[DemoResult] = []

    def started(self, settings: DemoSettings, recipe: Any, about: Mapping[str, str], steps: int) -> None:
        self.started_with = {"variant": recipe.variant.name, "steps": steps, **about}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)

    def finished(self, result: DemoResult) -> None:
        self.results.append(result)


def test_the_default_learns_to_reverse_held_out_strings(tmp_path):
    recorder = Recorder()
    result = run_demo(DemoSettings(output_dir=str(tmp_path)), recorder)

    assert result.before.sampled < 0.2
    assert result.after.sampled >= 0.8
    assert result.after.greedy >= 0.8
    assert recorder.started_with["variant"] == "dapo"
    assert recorder.steps == list(range(1, recorder.started_with["steps"] + 1))
    assert recorder.results == [result]
    first, last = result.history[0], result.history[-1]
    for name in ("reward", "completions/mean_length", "clip_ratio/region_mean", "entropy", "frac_reward_zero_std"):
        assert name in first
    assert "kl" not in first  # dapo has none
    assert last["reward"] > first["reward"]
    # A step on which every group has equal rewards trains nothing, and has no entropy to report.
    entropies = [log["entropy"] for log in result.history if log["entropy"] is not None]
    assert entropies[-1] < entropies[0]
    # What is kept: the model, which answers as it did, the variant and the numbers.
    assert json.loads((tmp_path / "variant.json").read_text())["variant"] == "dapo"
    kept = json.loads((tmp_path / "demo.json").read_text())
    assert kept["after"]["sampled"] == result.after.sampled
    assert _greedy_accuracy_of(tmp_path) == result.after.greedy


def _greedy_accuracy_of(folder: Any) -> float:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from trl_variants.demo.evaluation import evaluate
    from trl_variants.demo.reverse import make_task

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tested = evaluate(model, tokenizer, make_task(0), seed=0, samples_per_question=1, batch_size=128, bf16=False)
    return tested.greedy


def test_nothing_is_learned_from_a_reward_of_noise():
    result = run_demo(DemoSettings(reward="noise"))
    # Measured: 0.000 sampled and greedy, with seeds 0 to 3; what the warm-up gave is lost.
    assert result.after.sampled < 0.3
    assert result.after.greedy < 0.3
    rewards = [log["reward"] for log in result.history]
    assert 0.45 < sum(rewards) / len(rewards) < 0.55  # a fair coin, to the end
    tosses = [runner_module._noise(seed)(["x"] * 64) for seed in (0, 0, 1)]
    assert tosses[0] == tosses[1] != tosses[2]


@pytest.mark.parametrize("variant", ["grpo", "reinforce_pp", "rloo"])
def test_kl_is_reported_where_a_variant_has_it(variant):
    result = run_demo(DemoSettings(variant=variant, **SHORT))
    assert all("kl" in log for log in result.history)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_ppo_trains_with_one_completion_per_question_and_every_step_is_reported(critic):
    recorder = Recorder()
    settings = DemoSettings(variant="ppo", overrides={"critic": critic}, **{**SHORT, "steps": 5})
    result = run_demo(settings, recorder)
    assert len(result.history) == len(recorder.steps) == 5
    # Four steps on a rollout of one completion a question: the fifth begins another.
    assert ["reward" in log for log in result.history] == [True, False, False, False, True]
    assert all("value_loss" in log for log in result.history)
    assert result.history[4]["explained_variance"] != 0


def test_variants_of_several_epochs_get_half_as_many_rollouts_by_default():
    plan = {name: runner_module._plan(DemoSettings(variant=name), resolve(name)) for name in ("dapo", "ppo", "a2c")}
    assert {name: (p.steps, p.num_generations, p.batch, p.max_rounds) for name, p in plan.items()} == {
        "dapo": (300, 8, 128, 3),
        "ppo": (600, 1, 128, None),
        "a2c": (300, 1, 128, None),
    }


@pytest.mark.parametrize("variant", ["reinforce", "reinforce_pp"])
def test_one_generation_per_prompt_where_the_variant_allows_it(variant):
    result = run_demo(DemoSettings(variant=variant, num_generations=1, **SHORT))
    assert len(result.history) == 2


def test_one_generation_is_refused_where_the_variant_compares_within_a_group():
    with pytest.raises(VariantError, match="'group_mean' needs at least 2 generations per prompt; .* is 1"):
        run_demo(DemoSettings(variant="grpo", num_generations=1))


def test_overrides_and_plugins_reach_the_trainer(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from trl_variants import Variant, component, hookimpl\n"
        "@component\n"
        "def shifted(rewards, *, by: float = 0.0):\n"
        "    '''Add a constant.'''\n"
        "    return rewards + by\n"
        "@hookimpl\n"
        "def register_reward_shapers():\n"
        "    return [shifted]\n"
        "@hookimpl\n"
        "def register_variants():\n"
        "    return [Variant(name='mine', extends='dapo', reward_shaper='shifted')]\n"
    )
    settings = DemoSettings(
        variant="mine", plugins=[str(plugin)], overrides={"reward_shaper": {"by": 5.0}}, steps=1, num_generations=4
    )
    (log,) = run_demo(settings).history
    assert log["reward_shaped"] == pytest.approx(log["reward"] + 5)


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    first, again, other = (run_demo(DemoSettings(seed=seed, **SHORT)) for seed in (7, 7, 8))

    def facts(result: DemoResult) -> Any:
        timing = ("step_time", "train_runtime", "speed/")
        logs = [{name: value for name, value in log.items() if not name.startswith(timing)} for log in result.history]
        return result.before, result.after, logs

    assert facts(first) == facts(again)
    assert facts(first) != facts(other)


def test_a_run_leaves_the_number_of_threads_and_the_temporary_folder_as_they_were(monkeypatch, tmp_path):
    monkeypatch.setattr(runner_module.tempfile, "tempdir", str(tmp_path))
    threads = torch.get_num_threads()
    run_demo(DemoSettings(steps=1))
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "dapoo"}, "No variant named 'dapoo'. Did you mean 'dapo'?"),
        ({"overrides": {"clip_rul": "ppo_clip"}}, "variant_overrides has no key 'clip_rul'. Did you mean 'clip_rule'?"),
        (
            {"task": "chain_sum"},
            "The tiny model knows only the task reverse. For 'chain_sum' give --model smollm2, a local folder or the "
            "id of a model on the hub.",
        ),
        (
            {"model": "smollm2", "task": "reverse"},
            "The task reverse belongs to the tiny model. Leave --model out, or choose another task.",
        ),
        (
            {"task_config": {"max_terms": 2}},
            "The task reverse has no settings; task_config is for the tasks of reasoning-gym.",
        ),
        ({"steps": 0}, "steps must be at least 1, not 0."),
        ({"reward": "nose"}, "reward must be 'task' or 'noise', not 'nose'."),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_built(monkeypatch, settings, message):
    monkeypatch.setattr(runner_module, "_prepare", lambda *_: pytest.fail("built before it was checked"))
    with pytest.raises(VariantError) as error:
        run_demo(DemoSettings(**settings))
    assert str(error.value).startswith(message)
