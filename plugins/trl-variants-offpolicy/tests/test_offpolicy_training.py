"""Runs with an engine whose log-probs are off: each variant acts on them, and without them is what it extends."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from tests import tiny
from tests.trainer import runs

PLUGIN = "trl_variants_offpolicy"
#: What each variant is where the engine returns no log-probs and a rollout is used once.
PLAIN = {
    "icepop": ("grpo", {}),
    "geo_is_grpo": ("grpo", {}),
    "geo_rs_grpo": ("grpo", {}),
    "k3_rs_grpo": ("grpo", {}),
    "opsm_grpo": ("grpo", {}),
    "decoupled_grpo": ("grpo", {}),
    "decoupled_ppo": ("ppo", {}),
    "dppo_tv": ("grpo", {"kl": None, "loss_aggregator": "token_mean"}),
    "dppo_kl": ("grpo", {"kl": None, "loss_aggregator": "token_mean"}),
    "m2po": ("grpo", {"kl": None, "loss_aggregator": "token_mean"}),
    "topr": ("reinforce", {}),
}
#: The rewards of these runs are between 0 and 1; REINFORCE has no negative examples without a baseline.
CENTRED = {"advantage_estimator": {"baseline": 0.5}}


def engine(prompt: str, index: int, tokens: list[int]) -> list[float | None]:
    """Exact log-probs plus noise that is larger for some tokens; some could not be scored."""
    ids = torch.tensor([[*tiny.tokenizer()(prompt)["input_ids"], *tokens]])
    with torch.no_grad():
        logs = tiny.model()(input_ids=ids).logits.double().log_softmax(-1)[0, -len(tokens) - 1 : -1]
    draw = random.Random(f"engine|{prompt}|{index}")
    exact = [logs[i, token].item() for i, token in enumerate(tokens)]
    return [None if draw.random() < 0.1 else min(value + draw.gauss(0, 1.0), 0.0) for value in exact]


def trained(folder: Any, variant: str, overrides: Any = None, sampled: Any = None, **settings: Any) -> runs.Watched:
    fields = {} if sampled is None else {"logprobs": sampled}
    return runs.trained(
        folder,
        variant,
        options={"rollout_func": runs.scripted(**fields)},
        variant_plugins=[PLUGIN],
        variant_overrides=overrides or {},
        **{"max_steps": 2, "num_iterations": 1, **settings},
    )


@pytest.mark.parametrize("variant", PLAIN)
def test_the_engines_log_probs_matter_and_without_them_it_is_the_plain_variant(variant: str, tmp_path: Any) -> None:
    plain, changes = PLAIN[variant]
    own = CENTRED if variant == "topr" else {}
    with_engine, without = trained(tmp_path, variant, own, engine), trained(tmp_path, variant, own)
    same = trained(tmp_path, plain, {**changes, **own})
    assert with_engine.spy.batches[0][0].sampling_log_probs is not None
    assert without.spy.batches[0][0].sampling_log_probs is None
    torch.testing.assert_close(runs.weights(without.model), runs.weights(same.model), atol=1e-6, rtol=0)
    assert (runs.weights(with_engine.model) - runs.weights(without.model)).abs().max() > 1e-4


@pytest.mark.parametrize("variant", ["dppo_tv", "dppo_kl", "m2po"])
def test_a_rollout_used_again_is_compared_with_the_policy_that_drew_it(variant: str, tmp_path: Any) -> None:
    # No engine's log-probs. At the first update nothing has moved; at the second the rule binds.
    overrides = {} if variant == "m2po" else {"clip_rule": {"delta_low": 0.001, "delta_high": 0.001}}
    first, second = trained(tmp_path, variant, overrides, num_iterations=2).logs
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert first[name] == 0 < second[name]


@pytest.mark.parametrize("sampled", [None, engine])
def test_topr_tapers_by_the_ratio_of_the_whole_completion(sampled: Any, tmp_path: Any) -> None:
    trainer = trained(tmp_path, "topr", CENTRED, sampled, num_iterations=2)
    parts = [batch for batch, *_ in trainer.spy.batches]
    for logged, step in zip(trainer.losses, (parts[:2], parts[2:]), strict=True):
        total, weights = 0.0, []
        for batch in step:
            drawn_by = batch.old_log_probs if batch.sampling_log_probs is None else batch.sampling_log_probs
            drawn_by = torch.where(drawn_by.isnan(), batch.old_log_probs, drawn_by)
            for row in range(len(batch.mask)):
                now = batch.log_probs[row][batch.mask[row]].double()
                gap = (now - drawn_by[row][batch.mask[row]]).sum().item()
                advantage = batch.advantages[row, 0].item()
                weights.append(min(math.exp(gap), 1.0) if advantage < 0 else 1.0)
                total -= weights[-1] * advantage * now.sum().item()
        assert logged == pytest.approx(total / len(weights), rel=1e-5, abs=1e-5)
    assert min(weights) < 0.9 and 1.0 in weights
