"""Metrics of an optimizer step against plain loops in float64: micro-batches of other widths, whatever is clipped."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.components.common import checked, close, double, numbers
from trl_variants import ClipResult, Totals, component, resolve, use
from trl_variants.data import Batch
from trl_variants.metrics import of_step
from trl_variants.registry import load_registry

REGISTRY = load_registry("none")
NAMES = ("log_probs", "old_log_probs", "ref_log_probs", "entropies", "values", "old_values", "returns")


@component
def by_both(log_ratio: Tensor, advantages: Tensor) -> ClipResult:
    """Low of a completion as a whole, high and dual of its tokens."""
    low = log_ratio[:, :1] < -0.1
    return ClipResult(loss=-log_ratio * advantages, low=low, high=log_ratio > 0.1, dual=log_ratio > 0.5)


@component
def approx_kl(entropies: Tensor) -> Tensor:
    return 2 * entropies


RECIPES = {
    "tokens": {"clip_rule": "dual_clip"},
    "completions": {
        "importance_ratio": "sequence",
        "clip_rule": "ppo_clip",
        "loss_aggregator": "seq_mean_token_mean",
    },
    "both": {"clip_rule": by_both},
    "low alone": {"clip_rule": "cispo"},
    "none": {"importance_ratio": "none", "clip_rule": "policy_gradient"},
}
ESTIMATORS = ("k1", "k3", "abs")


@st.composite
def steps(draw: Any) -> list[dict[str, Any]]:
    """One to three micro-batches, each with its own rows and width; some rows are empty, some have no reward."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        n, t = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        lists = st.lists(st.lists(numbers, min_size=t, max_size=t), min_size=n, max_size=n)
        mask = draw(st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=n, max_size=n))
        part = {name: double(draw(lists)) / 4 for name in NAMES}
        part["advantages"] = double(draw(st.lists(numbers, min_size=n, max_size=n)))
        part["scored"] = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
        parts.append({**part, "mask": torch.tensor(mask)})
    return parts


def k3(p: float, q: float) -> float:
    return math.exp(q - p) + p - q - 1


def kl(name: str, p: float, q: float) -> float:
    return {"k1": p - q, "k2": (p - q) ** 2 / 2, "k3": k3(p, q), "abs": abs(p - q)}[name]


def clipped(kind: str, log_ratios: list[float], advantage: float) -> dict[str, list[bool]]:
    """What is clipped of one completion, from the log-ratios of its tokens; one entry where it is one of the whole."""
    ratios = [math.exp(value) for value in log_ratios]
    if kind == "tokens":  # epsilons of 0.2, c of 3
        return {
            "low": [r < 0.8 and advantage < 0 for r in ratios],
            "high": [r > 1.2 and advantage > 0 for r in ratios],
            "dual": [advantage < 0 and r * -advantage > 3 * -advantage for r in ratios],
        }
    if kind == "completions":
        ratio = math.exp(sum(log_ratios) / len(log_ratios))
        return {"low": [ratio < 0.8 and advantage < 0], "high": [ratio > 1.2 and advantage > 0]}
    if kind == "low alone":  # a cap of 5
        return {"high": [r > 5 and advantage != 0 for r in ratios]}
    return {}


def by_loop(kind: str, estimator: str, parts: list[dict[str, Any]]) -> dict[str, float]:
    """Every metric, token by token."""
    seen: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {"low": [], "high": []}
    for part in parts:
        for i, row in enumerate(part["mask"].tolist()):
            tokens = [t for t, counts in enumerate(row) if counts]
            token = {t: {name: float(part[name][i, t]) for name in NAMES} for t in tokens}
            log_ratios = {t: x["log_probs"] - x["old_log_probs"] for t, x in token.items()}
            for x in token.values():
                error, near = (x["values"] - x["returns"]) ** 2, x["values"]
                near = min(max(near, x["old_values"] - 0.2), x["old_values"] + 0.2)
                near = (near - x["returns"]) ** 2
                scored = bool(part["scored"][i])
                for name, value in {
                    "approx_kl": k3(x["old_log_probs"], x["log_probs"]),
                    "entropy": x["entropies"],
                    "regularizer/approx_kl": 2 * x["entropies"],
                    "value_loss": max(error, near) / 2 if scored else 0.0,
                    "kl": kl(estimator, x["log_probs"], x["ref_log_probs"]),
                    "kl/k3": k3(x["log_probs"], x["ref_log_probs"]),
                }.items():
                    seen.setdefault(name, []).append(value)
                if scored:
                    seen.setdefault("clip_ratio/value", []).append(float(near > error))
            if not tokens:
                continue
            flags = clipped(kind, list(log_ratios.values()), float(part["advantages"][i]))
            if kind == "both":
                # What the first column says of the completion; masked positions hold 0.
                first = log_ratios.get(0, 0.0) < -0.1
                high = [value > 0.1 for value in log_ratios.values()]
                flags = {"low": [first] * len(tokens), "high": high, "dual": [v > 0.5 for v in log_ratios.values()]}
            if {"low", "high"} <= flags.keys():
                flags["region"] = [a or b for a, b in zip(flags["low"], flags["high"], strict=True)]
            for name, where in flags.items():
                seen.setdefault(f"clip_ratio/{name}_mean", []).extend(map(float, where))
                if name in shares:
                    shares[name].append(sum(where) / len(where))
    out = {name: sum(values) / len(values) for name, values in seen.items()}
    out |= {"clip_ratio/low_min": min(shares["low"])} if shares["low"] else {}
    return out | ({"clip_ratio/high_max": max(shares["high"])} if shares["high"] else {})


@pytest.mark.parametrize(
    ("kind", "estimator"), [*(("tokens", name) for name in ESTIMATORS), *((kind, "k2") for kind in RECIPES)]
)
@checked
@given(parts=steps())
def test_the_metrics_of_a_step_are_those_of_a_loop(kind: str, estimator: str, parts: list[dict[str, Any]]) -> None:
    overrides = {
        "kl": {"estimator": estimator, "placement": {"name": "loss", "weighted": estimator == "k1"}, "coef": 0.1},
        "regularizer": [use("value_loss", coef=0.5), use(approx_kl, coef=0.1)],
    }
    recipe = resolve("ppo", {**overrides, **RECIPES[kind]}, REGISTRY)
    totals = Totals(tokens=9, sequences=3, rows=3)
    observed = [recipe.loss(Batch(totals=totals, **part)).observed for part in parts]
    got = {name: float(metric) for name, metric in of_step(observed).items()}
    want = by_loop(kind, estimator, parts)
    assert {name for name, value in got.items() if not math.isnan(value)} == want.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, abs=1e-6), name


def test_what_a_micro_batch_leaves_holds_no_graph_and_nothing_larger_than_itself() -> None:
    logits = torch.randn(3, 4, 50, requires_grad=True)
    logs = logits.log_softmax(-1)
    tensors = {name: logs[..., i].double() for i, name in enumerate(NAMES)}
    mask = torch.ones(3, 4).bool()
    recipe = resolve("ppo", {"regularizer": ["value_loss", "entropy_bonus"]}, REGISTRY)
    batch = Batch(advantages=torch.ones(3).double(), mask=mask, totals=Totals.of(mask), **tensors)
    observed = replace(recipe.loss(batch)).observed
    kept = [observed.mask, *observed.values.values(), *observed.terms.values(), *observed.clipped.values()]
    assert len(kept) > 8
    for tensor in kept:
        assert tensor.grad_fn is None and not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() <= 12 * 8
    close(observed.values["log_probs"], batch.log_probs.detach())
