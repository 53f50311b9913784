"""Corrections and KL on a real run: the engine's log-probs, the three placements of KL, its controller, evaluation."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch

from tests import tiny
from tests.trainer import runs
from trl_variants import KL

# -- rollout correction --------------------------------------------------------------------------------------------

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def engine(policy: Any, spread: float = 0.6) -> Any:
    """Log-probs of an engine that is off by a random amount per token, and could not score some."""

    def sampled(prompt: str, index: int, tokens: list[int]) -> list[float | None]:
        ids = torch.tensor([[*tiny.tokenizer()(prompt)["input_ids"], *tokens]])
        with torch.no_grad():
            logs = policy(input_ids=ids).logits.double().log_softmax(-1)[0, -len(tokens) - 1 : -1]
        draw = random.Random(f"engine|{prompt}|{index}")
        exact = [logs[i, token].item() for i, token in enumerate(tokens)]
        return [None if draw.random() < 0.1 else value + draw.gauss(0, spread) for value in exact]

    return sampled


def correction(
    mode: str, low: float | None, high: float | None, old: Any, sampled: Any, mask: Any
) -> list[list[float]]:
    """TRL's formula, written as loops: what each token's loss is multiplied by."""
    weights = []
    for row in range(len(mask)):
        gaps = [
            (old[row][t] - sampled[row][t]) if mask[row][t] and not math.isnan(sampled[row][t]) else 0.0
            for t in range(len(mask[row]))
        ]
        if mode.startswith("sequence"):
            gaps = [sum(gaps)] * len(gaps)
        line = []
        for gap in gaps:
            weight = math.exp(gap)
            if mode.endswith("truncate"):
                weight = min(weight, high) if high is not None else weight
                weight = max(weight, low) if low is not None else weight
            elif (low is not None and weight < low) or (high is not None and weight > high):
                weight = 0.0
            line.append(weight)
        weights.append(line)
    return weights


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(None, 1.5), (0.7, 1.4)])
def test_log_probs_of_the_engine_correct_the_loss_as_in_trl(
    mode: str, low: float | None, high: float | None, tmp_path: Any
) -> None:
    sampled = engine(tiny.model(), spread=0.2 if mode.startswith("sequence") else 0.6)

    def run(**overrides: Any) -> runs.Watched:
        return runs.trained(
            tmp_path,
            "trl_dapo",
            options={"rollout_func": runs.scripted(logprobs=sampled)},
            variant_overrides={**overrides},
            max_steps=1,
            learning_rate=0.0,
            max_grad_norm=0.0,
        )

    trainer = run(token_weight={"mode": mode, "clip_min": low, "clip_max": high})
    total, used = 0.0, []
    for batch, *_ in trainer.spy.batches:
        old = batch.old_log_probs.double().tolist()
        weights = correction(mode, low, high, old, batch.sampling_log_probs.tolist(), batch.mask.tolist())
        for row, column in batch.mask.nonzero().tolist():
            total -= weights[row][column] * batch.advantages[row, 0].item()
            used.append(weights[row][column])
    assert trainer.losses[0] == pytest.approx(total / len(used), abs=1e-5)
    assert len({round(weight, 6) for weight in used}) > 2  # and they differ
    if mode.endswith("mask"):
        assert 0.0 in used
    bounds = [bound for bound in (low, high) if bound is not None]
    assert mode.endswith("mask") or any(weight in bounds for weight in used)
    # And they are logged under TRL's names.
    gaps, weights = [], []
    for batch, *_ in trainer.spy.batches:
        old, engines = batch.old_log_probs.tolist(), batch.sampling_log_probs.tolist()
        places = batch.mask.nonzero().tolist()
        gaps += [abs(old[i][t] - engines[i][t]) for i, t in places if not math.isnan(engines[i][t])]
        lines = correction(mode, low, high, old, engines, batch.mask.tolist())
        weights += [line[0] for line in lines] if mode.startswith("sequence") else [lines[i][t] for i, t in places]
    logged = {k.removeprefix("sampling/"): v for k, v in trainer.logs[0].items() if k.startswith("sampling/")}
    assert logged == {
        "sampling_logp_difference/mean": pytest.approx(sum(gaps) / len(gaps), abs=1e-5),
        "sampling_logp_difference/max": pytest.approx(max(gaps), abs=1e-5),
        "importance_sampling_ratio/min": pytest.approx(min(weights), abs=1e-5),
        "importance_sampling_ratio/mean": pytest.approx(sum(weights) / len(weights), abs=1e-5),
        "importance_sampling_ratio/max": pytest.approx(max(weights), abs=1e-5),
    }
    off = run(token_weight="none")
    assert not [name for name in off.logs[0] if "importance_sampling_ratio" in name]
    assert off.losses[0] != pytest.approx(trainer.losses[0], abs=1e-3)


def test_an_engine_that_returns_nothing_corrects_nothing(tmp_path: Any) -> None:
    with_it = runs.trained(tmp_path, "grpo", options={"rollout_func": runs.scripted()}, max_steps=2)
    without = runs.trained(
        tmp_path,
        "grpo",
        options={"rollout_func": runs.scripted()},
        variant_overrides={"token_weight": "none"},
        max_steps=2,
    )
    assert with_it.spy.batches[0][0].sampling_log_probs is None
    assert not [name for name in with_it.logs[0] if name.startswith("sampling/")]
    assert torch.equal(runs.weights(with_it.model), runs.weights(without.model))


def test_the_correction_uses_the_old_log_probs_of_every_epoch(tmp_path: Any) -> None:
    # It is the ratio of the policy at the rollout to the engine: the same in the second epoch as in the first.
    policy = tiny.model()
    trainer = runs.trained(
        tmp_path,
        "trl_dapo",
        options={"rollout_func": runs.scripted(logprobs=engine(policy))},
        num_iterations=2,
        max_steps=2,
    )
    first, second = trainer.spy.batches[:2], trainer.spy.batches[2:]
    for (a, *_), (b, *_) in zip(first, second, strict=True):
        assert torch.equal(a.old_log_probs, b.old_log_probs) and not torch.equal(a.log_probs, b.log_probs)
        torch.testing.assert_close(a.sampling_log_probs, b.sampling_log_probs, equal_nan=True)


# -- KL in the reward ----------------------------------------------------------------------------------------------


class Apart(runs.Watched):
    """Moves the policy once the reference is taken, so that KL is not 0 at the first rollout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(11)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        self.start = copy.deepcopy({k: v.detach() for k, v in self.model.state_dict().items()})


@pytest.fixture
def apart(monkeypatch: Any) -> None:
    monkeypatch.setattr(runs, "Watched", Apart)


def exact_kl(trainer: Apart, estimator: str) -> tuple[dict[str, Any], list[list[float]]]:
    """Per-token KL of the first rollout in float64, from plain forwards of policy and reference."""
    output = trainer.generated[0]
    policy = tiny.model()
    policy.load_state_dict(trainer.start)
    d = runs.log_probs(policy, output) - runs.log_probs(tiny.model(), output)
    formula = {
        "k1": lambda x: x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(-x) + x - 1,
        "abs": abs,
    }[estimator]
    mask = output["loss_mask"]
    return output, [[formula(d[i, t].item()) for t in range(d.shape[1]) if mask[i, t]] for i in range(len(d))]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("placement", ["sequence_reward", "token_reward"])
@pytest.mark.usefixtures("apart")
def test_kl_in_the_reward_enters_before_the_baseline(estimator: str, placement: str, tmp_path: Any) -> None:
    # pains D04. The estimator takes scalars, so both placements are one sum: r - beta * sum of KL, before the baseline.
    beta = 0.3
    trainer = runs.trained(
        tmp_path,
        "rloo",
        variant_overrides={"kl": KL(estimator, placement=placement, coef=beta)},
        max_steps=1,
    )
    rollout, result, _ = trainer.spy.rollouts[0]
    _, kl = exact_kl(trainer, estimator)
    rewards = [r - beta * sum(line) for r, line in zip(rollout.rewards.tolist(), kl, strict=True)]
    expected = []
    for i, reward in enumerate(rewards):
        group = rewards[i // 4 * 4 : i // 4 * 4 + 4]
        expected.append(reward - (sum(group) - reward) / 3)
    assert result.rewards.tolist() == pytest.approx(rewards, abs=2e-4)
    assert result.advantages.tolist() == pytest.approx(expected, abs=3e-4)
    flat = [value for line in kl for value in line]
    entry = trainer.logs[0]
    assert entry["kl"] == pytest.approx(sum(flat) / len(flat), abs=2e-5)
    assert abs(entry["kl"]) > 1e-3 and entry["kl/k3"] > 0 and entry["kl_coef"] == beta
    # The loss has no KL term of its own: it is -A log pi summed over tokens, mean over completions.
    sums = (rollout.log_probs * rollout.mask).double().sum(1).tolist()
    expected_loss = -sum(a * s for a, s in zip(result.advantages.tolist(), sums, strict=True)) / 8
    assert trainer.losses[0] == pytest.approx(expected_loss, abs=1e-4)


@pytest.mark.parametrize(
    ("gamma", "placement"), [(1.0, "token_reward"), (0.5, "token_reward"), (0.5, "sequence_reward")]
)
@pytest.mark.usefixtures("apart")
def test_kl_per_token_is_discounted_and_kl_per_sequence_is_not(gamma: float, placement: str, tmp_path: Any) -> None:
    # pains D06: returns by loop; the reward of a completion stands on its last token.
    beta = 0.3
    trainer = runs.trained(
        tmp_path,
        "reinforce_pp",
        variant_overrides={
            "kl": KL("k1", placement=placement, coef=beta),
            "advantage_estimator": {"gamma": gamma},
            "advantage_normalizer": "none",
        },
        max_steps=1,
    )
    rollout, result, _ = trainer.spy.rollouts[0]
    _, kl = exact_kl(trainer, "k1")
    for row, line in enumerate(kl):
        rewards = [-beta * value for value in line] if placement == "token_reward" else [0.0] * len(line)
        rewards[-1] += rollout.rewards[row].item()
        if placement == "sequence_reward":
            rewards[-1] -= beta * sum(line)
        carry, returns = 0.0, []
        for reward in reversed(rewards):
            carry = reward + gamma * carry
            returns.insert(0, carry)
        got = result.advantages[row][rollout.mask[row]].tolist()
        assert got == pytest.approx(returns, abs=2e-4)
    # They are trained as they are: on-policy the loss is their mean with the sign turned.
    mean = result.advantages[rollout.mask].double().mean()
    assert trainer.losses[0] == pytest.approx(-float(mean), abs=1e-5)


@pytest.mark.parametrize("weighted", [False, True, "detached"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.usefixtures("apart")
def test_kl_in_the_loss_is_beta_times_the_mean_of_what_is_logged(estimator: str, weighted: Any, tmp_path: Any) -> None:
    beta = 0.3
    trainer = runs.trained(
        tmp_path,
        "trl_dapo",
        variant_overrides={"kl": KL(estimator, placement="loss", coef=beta, weighted=weighted)},
        max_steps=1,
        learning_rate=0.0,
    )
    rollout, result, _ = trainer.spy.rollouts[0]
    _, kl = exact_kl(trainer, estimator)
    flat = [value for line in kl for value in line]
    policy = sum(a * n for a, n in zip(result.advantages.tolist(), rollout.mask.sum(1).tolist(), strict=True))
    # On-policy the ratio is 1, so the weight changes the gradient but not the value.
    assert trainer.losses[0] == pytest.approx((-policy + beta * sum(flat)) / len(flat), abs=2e-5)
    assert trainer.logs[0]["kl"] == pytest.approx(sum(flat) / len(flat), abs=2e-5)
    assert result.rewards.tolist() == rollout.rewards.tolist()
