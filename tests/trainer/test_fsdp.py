"""A critic under FSDP2: two processes do what one does. One launch of torchrun runs all of ``sharded.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.trainer import grpo_trainer

from tests import tiny
from tests.trainer import parallel, runs, sharded
from tests.trainer.test_critic import ppo
from tests.trainer.test_two_processes import assert_close, assert_same_numbers


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    for name in sharded.CHECKPOINTS:  # of one process, for the two to load
        sharded.built(name, folder / f"alone-{name}", gradient_accumulation_steps=4, save_steps=4).train()
    parallel.launch("tests.trainer.sharded", folder)
    return folder


def load(folder: Path, name: str) -> list[Any]:
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]


def assert_equal(a: Any, b: Any) -> None:
    """The same structure, and bit for bit the same tensors."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert_equal(value, b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("name", sharded.CASES)
def test_two_shards_give_the_numbers_of_one_process(name: str, launched: Path, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    alone = parallel.run(name, tmp_path, per_device=2, accumulation=4, eval_rows=16, per_device_eval_batch_size=16)
    ranks = load(launched, name)
    assert [rank["kind"] for rank in ranks] == ["DistributedType.FSDP"] * 2
    moved = {"gradients": 0, "critic_gradients": 0}
    for mine in ranks:
        for kind in moved:
            for a, b in zip(alone[kind], mine[kind], strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert_close(a, b)
                    moved[kind] += float(a.norm()) > 1e-3
        assert_close(alone["weights"], mine["weights"])
        assert_close(alone["critic"], mine["critic"])
    assert moved["gradients"] > 0 and (moved["critic_gradients"] > 0 or name == "stateful")
    norms = [[log.get("critic/grad_norm") for log in rank["logs"]] for rank in ranks]
    assert norms[0] == norms[1]
    # The norms before clipping, values and losses among them.
    for a, b in zip(alone["logs"], ranks[0]["logs"], strict=True):
        assert_same_numbers(a, b)
    timed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_speed")
    evaluations = [{k: v for k, v in seen["evaluation"].items() if not k.startswith(timed)} for seen in (alone, *ranks)]
    assert_same_numbers(evaluations[0], evaluations[1])
    assert evaluations[2].keys() == evaluations[0].keys()


@pytest.mark.parametrize("name", sharded.CHECKPOINTS)
def test_a_resumed_run_equals_the_uninterrupted_one_critic_and_all(name: str, launched: Path) -> None:
    for mine in load(launched, f"saved-{name}"):
        assert_equal(mine["whole"], mine["again"])
        state = mine["whole"]["optimizer"]["state"]
        assert all({"step", "exp_avg", "exp_avg_sq"} <= values.keys() for values in state.values())
        # Every weight that is trained has its moments, whole, under its own name.
        critic = mine["whole"]["critic"]
        assert all(state[key]["exp_avg"].numel() == critic[key].numel() for key in state)
        assert ("weight" if "shared" in name else "head.weight") in state
        whole, again = (log[2:] for log in mine["logs"])
        for a, b in zip(whole, again, strict=True):
            timed = ("step_time", "epoch", "speed/")
            assert_equal(*({k: v for k, v in log.items() if not k.startswith(timed)} for log in (a, b)))


@pytest.mark.parametrize("name", sharded.CHECKPOINTS)
def test_the_critic_of_a_checkpoint_fits_any_number_of_processes(name: str, launched: Path, tmp_path: Any) -> None:
    alone = sharded.built(name, tmp_path, gradient_accumulation_steps=4, max_steps=1, critic_warmup_steps=0)
    alone.train()
    both = load(launched, f"saved-{name}")
    # Written by two, read by one ...
    alone.critic.load(str(launched / f"saved-{name}" / "checkpoint-4"))
    for kind in ("critic", "optimizer", "scheduler"):
        assert_equal(sharded.state_of(alone)[kind], both[0]["whole"][kind])
    # ... and the other way round.
    alone.critic.load(str(launched / f"alone-{name}" / "checkpoint-4"))
    for mine in both:
        for kind in ("critic", "optimizer", "scheduler"):
            assert_equal(sharded.state_of(alone)[kind], mine["from one"][kind])


@pytest.mark.parametrize("name", sharded.CHECKPOINTS)
def test_a_checkpoint_has_of_the_critic_what_is_trained(name: str, launched: Path) -> None:
    saved = load_file(launched / f"saved-{name}" / "checkpoint-4" / "critic" / "critic.safetensors")
    critic = load(launched, f"saved-{name}")[0]["whole"]["critic"]
    trained = {key for key in critic if "_lora" not in name or ".lora_" in key or "head." in key or "." not in key}
    assert saved.keys() == trained and all(torch.equal(saved[key].flatten(), critic[key]) for key in saved)


def test_the_separate_critic_of_a_checkpoint_is_a_start_for_another_run(launched: Path, tmp_path: Any) -> None:
    folder = launched / "saved-separate" / "checkpoint-4"
    trainer = ppo(tmp_path, critic_model=str(folder / "critic"))
    critic = load(launched, "saved-separate")[0]["whole"]["critic"]
    assert_equal({name: runs.whole(p) for name, p in trainer.critic.model.named_parameters()}, critic)


@pytest.mark.parametrize("name", ["separate", "separate_lora", "shared_lora"])
def test_the_exported_policy_has_nothing_of_the_critic(name: str, launched: Path) -> None:
    policy = load(launched, f"saved-{name}")[0]["whole"]["policy"]
    for place in (launched / f"export-{name}", launched / f"saved-{name}" / "checkpoint-4"):
        if "lora" in name:
            loaded = PeftModel.from_pretrained(tiny.model(), place)
        else:
            loaded, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
            assert not info["unexpected_keys"] and not info["missing_keys"]
        assert torch.equal(runs.weights(loaded), policy)
    assert not [path for path in (launched / f"export-{name}").rglob("*") if "critic" in path.name]


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_values_are_float32_under_mixed_precision_too(kind: str, launched: Path) -> None:
    for values in load(launched, f"bf16-{kind}"):
        assert values.dtype == torch.float32 and values.isfinite().all()
        assert not torch.equal(values, values.bfloat16().float())


def test_the_best_model_comes_back_with_its_critic(launched: Path) -> None:
    folder = launched / "best" / "checkpoint-2"
    saved = load_file(folder / "critic" / "critic.safetensors")
    for mine in load(launched, "best"):
        assert_equal({key: value.flatten() for key, value in saved.items()}, mine["critic"])
        assert torch.equal(runs.weights(AutoModelForCausalLM.from_pretrained(folder)), mine["policy"])


@pytest.mark.parametrize("name", sharded.MIXED)
def test_what_models_compute_in_bfloat16_is_not_rounded_to_it_on_the_way_out(name: str, launched: Path) -> None:
    """Of 100 numbers of float32 that are taken anyhow, 2^-16 are numbers of bfloat16."""
    for rank in (0, 1):
        seen = torch.load(launched / f"mixed-{name}-{rank}.pt")
        for key, parts in seen.items():
            values = torch.cat(parts)
            values = values[values != 0]  # values, before the critic has learned
            assert len(values) > 10 and values.dtype is torch.float32
            assert (values.bfloat16().float() == values).float().mean() < 0.1, key
        assert torch.equal(torch.cat(seen["log_probs"][:2]), torch.cat(seen["old_log_probs"][:2]))
        moved = torch.cat(seen["log_probs"][2:]) - torch.cat(seen["old_log_probs"][2:])
        assert 0 < moved.abs().max() < 1
