"""Checkpoints: a run goes on from any of them, and what they hold loads anywhere."""

from __future__ import annotations

import functools
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.trainer import runs
from tests.trainer.test_adapters import LORA, adapted, adapter_weights
from trl_variants import KL, use
from trl_variants.describe import recipe_dict

#: One mini-batch per rollout and two epochs: rollouts begin before steps 1, 3 and 5.
SETTINGS: dict[str, Any] = {"num_iterations": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 1}
STATEFUL = {
    "kl": KL("k3", placement="loss", coef=0.2, controller=use("adaptive", target=0.01, horizon=80)),
    "regularizer": use("adaptive_entropy", target=10.0, delta=0.1),
}


def resumed(folder: Any, step: int, variant: str = "grpo", **settings: Any) -> runs.Watched:
    """A new trainer, in a folder that holds the checkpoint of one step only."""
    other = Path(tempfile.mkdtemp(dir=folder.parent))
    shutil.copytree(folder / f"checkpoint-{step}", other / f"checkpoint-{step}")
    trainer = runs.build(other, variant, **{**SETTINGS, **settings})
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, runs.Watched]:
    folder = tmp_path_factory.mktemp("run") / "whole"
    return folder, runs.trained(folder, "grpo", variant_overrides=STATEFUL, **SETTINGS)


@pytest.fixture(scope="module")
def again(whole: Any) -> Callable[[int], runs.Watched]:
    """The run, resumed from a step."""
    return functools.cache(lambda step: resumed(whole[0], step, variant_overrides=STATEFUL))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_run_goes_on_from_every_step_on_the_schedule_of_rollouts(step: int, whole: Any, again: Any) -> None:
    # pains F01. From the middle of a rollout a new one is drawn for what is left of it.
    uninterrupted, trainer = whole[1], again(step)
    assert trainer.state.global_step == 6 and len(trainer.gradients) == 6 - step
    schedule = uninterrupted.generations_before_step
    assert schedule == [1, 1, 2, 2, 3, 3]
    skipped = step // 2
    assert trainer.generations_before_step == [n - skipped for n in schedule[step:]]
    new = [entry for entry in trainer.logs if entry["step"] > step]
    assert len(new) == 6 - step
    assert all(math.isfinite(value) for entry in new for value in entry.values())
    # On the first step after a rollout, drawn anew or not, the ratio is exactly 1.
    rollouts = [0, *(i for i in range(1, 6 - step) if (i + step) % 2 == 0)]
    for index in range(6 - step):
        for batch, *_ in trainer.spy.batches[2 * index : 2 * index + 2]:
            assert torch.equal(batch.log_probs, batch.old_log_probs) == (index in rollouts)


@pytest.mark.parametrize("step", [2, 4])
def test_from_a_rollouts_end_it_goes_on_exactly_as_if_never_interrupted(step: int, whole: Any, again: Any) -> None:
    uninterrupted, trainer = whole[1], again(step)
    assert torch.equal(runs.weights(trainer.model), runs.weights(uninterrupted.model))
    for mine, theirs in zip(trainer.generated, uninterrupted.generated[step // 2 :], strict=True):
        assert torch.equal(mine["completion_ids"], theirs["completion_ids"])
        assert torch.equal(mine["ref_per_token_logps"], theirs["ref_per_token_logps"])
    assert trainer._states == uninterrupted._states and trainer._next_kl_coef == uninterrupted._next_kl_coef
    assert trainer.losses[step:] == uninterrupted.losses[step:]


@pytest.mark.parametrize("step", [1, 3])
def test_from_a_rollouts_middle_the_prompts_stay_those_of_the_schedule(step: int, whole: Any, again: Any) -> None:
    uninterrupted, trainer = whole[1], again(step)
    for mine, theirs in zip(trainer.generated, uninterrupted.generated[step // 2 :], strict=True):
        assert torch.equal(mine["prompt_ids"], theirs["prompt_ids"])


def test_the_reference_of_a_resumed_run_is_the_start_of_the_first(whole: Any, again: Any) -> None:
    uninterrupted, trainer = whole[1], again(4)
    assert runs.digest(trainer.ref_model) == runs.digest(uninterrupted.ref_model) == runs.digest(tiny.model())


def test_a_checkpoint_is_a_plain_model_beside_the_variant_and_its_state(whole: Any) -> None:
    folder, uninterrupted = whole
    loaded = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-6")
    assert torch.equal(runs.weights(loaded), runs.weights(uninterrupted.model))
    assert not [name for name in loaded.state_dict() if name not in tiny.model().state_dict()]
    state = torch.load(folder / "checkpoint-6" / "variant_state.pt", weights_only=True)
    assert state.pop("recipe") == str(recipe_dict(uninterrupted.recipe))
    assert state == {"kl_coef": uninterrupted._next_kl_coef, "states": uninterrupted._states}
    written = json.loads((folder / "variant.json").read_text())
    assert written["kl"]["controller"]["parameters"]["target"] == 0.01
    args = torch.load(folder / "checkpoint-6" / "training_args.bin", weights_only=False)
    assert args.variant == "grpo" and args.recipe.kl.coef == 0.2


def test_a_checkpoint_without_the_variants_state_still_loads(whole: Any, tmp_path: Any) -> None:
    # One that TRL's own trainer saved, say.
    folder, _ = whole
    shutil.copytree(folder / "checkpoint-2", tmp_path / "a" / "checkpoint-2")
    (tmp_path / "a" / "checkpoint-2" / "variant_state.pt").unlink()
    trainer = resumed(tmp_path / "a", 2, variant_overrides=STATEFUL)
    assert trainer.spy.rollouts[0][2]["kl_coef"] == 0.2


@pytest.mark.parametrize("variant", ["dapo", "rloo", "reinforce_pp", "gspo"])
def test_other_variants_go_on_exactly_too(variant: str, tmp_path: Any) -> None:
    settings = {**SETTINGS, "num_iterations": 1, "max_steps": 3}
    uninterrupted = runs.trained(tmp_path / "a", variant, **settings)
    trainer = resumed(tmp_path / "a", 2, variant, **settings)
    assert torch.equal(runs.weights(trainer.model), runs.weights(uninterrupted.model))


def test_several_mini_batches_go_on_in_the_middle_of_a_rollout(tmp_path: Any) -> None:
    settings = {**SETTINGS, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 6}
    runs.trained(tmp_path / "a", "grpo", **settings)
    for step in (1, 2, 3, 5):
        trainer = resumed(tmp_path / "a", step, **settings)
        ones = [torch.equal(batch.log_probs, batch.old_log_probs) for batch, *_ in trainer.spy.batches][::2]
        # 4 steps to a rollout; the first step after a new one has ratio 1.
        assert ones == [i == 0 or (step + i) % 4 == 0 for i in range(6 - step)]
        assert all(gradient.isfinite().all() for gradient in trainer.gradients)


@pytest.mark.parametrize("kind", ["new", "handed_over"])
def test_adapters_go_on_exactly_with_their_first_start_as_reference(kind: str, tmp_path: Any) -> None:
    def settings() -> dict[str, Any]:
        if kind == "new":
            return {**SETTINGS, "model": tiny.model(), "options": {"peft_config": LoraConfig(**LORA)}}
        return {**SETTINGS, "model": adapted()}

    uninterrupted = runs.trained(tmp_path / "a", "grpo", **settings())
    trainer = resumed(tmp_path / "a", 4, **settings())
    mine, theirs = adapter_weights(trainer.model, "default"), adapter_weights(uninterrupted.model, "default")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert torch.equal(trainer.generated[0]["ref_per_token_logps"], uninterrupted.generated[2]["ref_per_token_logps"])


# -- a trainer that trains twice -----------------------------------------------------------------------------------


def test_a_second_call_of_train_draws_its_own_rollout(tmp_path: Any) -> None:
    # The first run stops in the middle of a rollout, which the second must not go on with: the model is another one.
    trainer = runs.build(tmp_path, "grpo", num_iterations=4, max_steps=2)
    trainer.train()
    assert len(trainer.generated) == 1
    trainer.train()
    assert len(trainer.generated) == 2 and trainer.generations_before_step == [1, 1, 2, 2]
    first = trainer.spy.batches[4][0]
    assert torch.equal(first.log_probs, first.old_log_probs)


def test_going_back_to_a_checkpoint_in_the_same_process_draws_a_new_rollout(tmp_path: Any) -> None:
    trainer = runs.trained(tmp_path, "grpo", **{**SETTINGS, "max_steps": 3})
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.generations_before_step == [1, 1, 2, 3]
    batch = trainer.spy.batches[-1][0]
    assert torch.equal(batch.log_probs, batch.old_log_probs)


def test_going_on_with_another_variant_is_warned_about(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    runs.trained(tmp_path / "a", "grpo", **SETTINGS)
    with caplog.at_level(logging.WARNING):
        resumed(tmp_path / "a", 2)
        assert "was written by another variant" not in caplog.text
        resumed(tmp_path / "a", 2, "dapo")
    assert "was written by another variant, or by other versions; this run goes on with 'dapo'" in caplog.text
