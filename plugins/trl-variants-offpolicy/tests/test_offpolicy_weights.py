"""Token weights: geometric-mean correction, rejection by divergence, the off-policy sequence mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl_variants_offpolicy.corrections import geometric_correction, rejection
from trl_variants_offpolicy.opsm import off_policy_mask

from tests.components.common import checked, close, double, tables
from trl_variants import VariantError, load_registry, resolve
from trl_variants.testing import make_batch

REGISTRY = load_registry("none", extra=["trl_variants_offpolicy"])
LN2, LN3 = math.log(2), math.log(3)
NAN = math.nan


# -- geometric mean ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "weight"),
    [  # ratios 2 and 3: geometric mean 6^{1/2} = 2.449489742783178
        ({"clip_max": 3.0}, 2.449489742783178),
        ({}, 1.2),
        ({"clip_max": None, "clip_min": 2.5}, 2.5),
        ({"mode": "mask", "clip_max": 3.0}, 2.449489742783178),
        ({"mode": "mask", "clip_max": 2.0}, 0.0),
        ({"mode": "mask", "clip_max": None, "clip_min": 2.5}, 0.0),
        ({"mode": "mask", "clip_max": 3.0, "clip_min": 2.0}, 2.449489742783178),
    ],
)
def test_the_geometric_mean_by_hand(parameters: dict, weight: float) -> None:
    old, engine = double([[-1.0, -1.0, 7.0]]), double([[-1.0 - LN2, -1.0 - LN3, -7.0]])
    close(geometric_correction(old, torch.tensor([[1, 1, 0]]), engine, **parameters), [[weight]])


def test_a_token_that_the_engine_could_not_score_has_the_ratio_1() -> None:
    old, engine = double([[-1.0, -1.0]]), double([[NAN, -1.0 - LN2]])
    mask = torch.ones(1, 2)
    close(geometric_correction(old, mask, engine, clip_max=3.0), [[math.sqrt(2)]])  # (1 * 2)^{1/2}
    close(rejection(old, mask, engine, estimator="k2", level="token", upper=0.1), [[1.0, 0.0]])  # ln2^2 / 2 = .24


@checked
@given(tables("old", "engine"), st.sampled_from(["truncate", "mask"]), st.sampled_from([(None, 1.2), (0.5, 2.0)]))
def test_the_geometric_mean_equals_a_loop(table: dict, mode: str, bounds: tuple) -> None:
    low, high = bounds
    expected = []
    for valid, ours, theirs in zip(table["mask"], table["old"], table["engine"], strict=True):
        gaps = [a - b for a, b, counts in zip(ours, theirs, valid, strict=True) if counts]
        weight = math.exp(sum(gaps) / len(gaps)) if gaps else 1.0
        inside = (low is None or weight >= low) and weight <= high
        cut = min(max(weight, low or 0.0), high) if mode == "truncate" else 0.0
        expected.append([weight if inside else cut])
    got = geometric_correction(
        double(table["old"]),
        torch.tensor(table["mask"]),
        double(table["engine"]),
        mode=mode,
        clip_min=low,
        clip_max=high,
    )
    close(got, expected)


# -- rejection ---------------------------------------------------------------------------------------------------------

# One sequence with r = pi_old / pi_sampler = 2 and 1/2. ln 2 = .693147:
#   k1 = -ln r           -.693147   .693147   sum 0          mean 0
#   k2 = (ln r)^2 / 2     .240227   .240227   sum .480453    mean .240227   max .240227
#   k3 = r - 1 - ln r     .306853   .193147   sum .5         mean .25       max .306853
REJECTED = [
    ("k1", "token", -0.69, 0.69, [[0, 0]]),
    ("k1", "token", -0.70, 0.69, [[1, 0]]),
    ("k1", "token", -0.69, 0.70, [[0, 1]]),
    ("k1", "token", None, 0.69, [[1, 0]]),
    ("k1", "seq_sum", -0.01, 0.01, [[1]]),
    ("k1", "seq_mean", 0.01, 0.02, [[0]]),
    ("k2", "token", None, 0.2402, [[0, 0]]),
    ("k2", "token", None, 0.2403, [[1, 1]]),
    ("k2", "seq_sum", None, 0.4804, [[0]]),
    ("k2", "seq_sum", None, 0.4805, [[1]]),
    ("k2", "seq_mean", None, 0.2403, [[1]]),
    ("k2", "seq_max", None, 0.2402, [[0]]),
    ("k2", "seq_max", None, 0.2403, [[1]]),
    ("k3", "token", None, 0.2, [[0, 1]]),
    ("k3", "seq_sum", None, 0.499, [[0]]),
    ("k3", "seq_sum", None, 0.501, [[1]]),
    ("k3", "seq_mean", None, 0.249, [[0]]),
    ("k3", "seq_mean", None, 0.251, [[1]]),
    ("k3", "seq_max", None, 0.3068, [[0]]),
    ("k3", "seq_max", None, 0.3069, [[1]]),
]


@pytest.mark.parametrize(("estimator", "level", "lower", "upper", "kept"), REJECTED)
def test_rejection_by_hand(estimator: str, level: str, lower: float | None, upper: float, kept: list) -> None:
    old, engine = double([[-2.0, -2.0, 5.0]]), double([[-2.0 - LN2, -2.0 + LN2, -5.0]])
    got = rejection(old, torch.tensor([[1, 1, 0]]), engine, estimator=estimator, level=level, lower=lower, upper=upper)
    close(got[:, : len(kept[0])], double(kept).double())


@checked
@given(
    tables("old", "engine"),
    st.sampled_from(["k1", "k2", "k3"]),
    st.sampled_from(["token", "seq_sum", "seq_mean", "seq_max"]),
    st.sampled_from([0.0317, 0.317, 3.17]),
)
def test_rejection_equals_a_loop(table: dict, estimator: str, level: str, upper: float) -> None:
    if (estimator, level) == ("k1", "seq_max"):
        level = "token"
    lower = -0.217 if estimator == "k1" else None
    expected = []
    for valid, ours, theirs in zip(table["mask"], table["old"], table["engine"], strict=True):
        line = []
        for a, b, counts in zip(ours, theirs, valid, strict=True):
            r = math.exp(a - b)
            line.append({"k1": b - a, "k2": (a - b) ** 2 / 2, "k3": r - 1 - (a - b)}[estimator] if counts else 0.0)
        n = max(sum(valid), 1)
        judged = {"token": line, "seq_sum": [sum(line)], "seq_mean": [sum(line) / n], "seq_max": [max(line)]}[level]
        expected.append([float(k <= upper and (lower is None or k >= lower)) for k in judged])
    got = rejection(
        double(table["old"]),
        torch.tensor(table["mask"]),
        double(table["engine"]),
        estimator=estimator,
        level=level,
        upper=upper,
        lower=lower,
    )
    close(got, expected)


def test_what_is_rejected_stays_in_the_denominator() -> None:
    # Two completions of one token, one rejected: A / 2 for the other, not A.
    old, engine = double([[-1.0], [-1.0]]), double([[-1.0], [-3.0]])
    log_probs = old.clone().requires_grad_()
    batch = make_batch(advantages=[1.0, 1.0], log_probs=log_probs, old_log_probs=old, sampling_log_probs=engine)
    resolve("k3_rs_grpo", {"kl": None}, REGISTRY).loss(batch).loss.backward()
    close(log_probs.grad, [[-0.5], [0.0]])


def test_small_divergences_are_exact_in_float32() -> None:
    # k3 of log r = 1e-3 is 5.0017e-7, below the rounding of exp(1e-3) in float32.
    old, engine = torch.zeros(1, 1), torch.tensor([[-1e-3]])
    assert rejection(old, torch.ones(1, 1), engine, level="token", upper=5.1e-7).item() == 1
    assert rejection(old, torch.ones(1, 1), engine, level="token", upper=4.9e-7).item() == 0


# -- off-policy sequence mask ------------------------------------------------------------------------------------------


def test_the_off_policy_mask_by_hand() -> None:
    # mean over the two valid tokens of log old - log pi: (.2 + .6) / 2 = .4
    now, old = double([[-1.2, -1.6, 9.0]] * 2), double([[-1.0, -1.0, -9.0]] * 2)
    mask, advantages = torch.tensor([[1, 1, 0]] * 2), double([[1.0], [-1.0]])
    close(off_policy_mask(now, old, advantages, mask, threshold=0.39), [[1.0], [0.0]])
    close(off_policy_mask(now, old, advantages, mask, threshold=0.41), [[1.0], [1.0]])
    # The engine instead: .4 + .3 = .7; NaN counts as no difference: (0 + .9) / 2 = .45.
    engine = double([[-0.9, -0.5, 3.0], [NAN, -0.7, 3.0]])  # .3 and 1.1 -> .7; NaN and .9 -> .45
    close(off_policy_mask(now, old, -advantages.abs(), mask, engine, threshold=0.5), [[0.0], [1.0]])
    close(off_policy_mask(now, old, -advantages.abs(), mask, engine, threshold=0.4), [[0.0], [0.0]])
    # A drift towards the completion is no reason; A = 0 stays; an advantage per token decides per token.
    close(off_policy_mask(old, now, -advantages.abs(), mask, threshold=0.0), [[1.0], [1.0]])
    close(off_policy_mask(now, old, double([[0.0], [0.0]]), mask, threshold=0.1), [[1.0], [1.0]])
    close(off_policy_mask(now, old, double([[1.0, -1.0, 0.0]] * 2), mask, threshold=0.1), [[1.0, 0.0, 1.0]] * 2)


@checked
@given(tables("now", "old", "engine"), st.data())
def test_the_off_policy_mask_equals_a_loop(table: dict, data: st.DataObject) -> None:
    rows = len(table["mask"])
    advantages = data.draw(st.lists(st.sampled_from([-1.5, 0.0, 1.0]), min_size=rows, max_size=rows))
    engine = table["engine"] if data.draw(st.booleans()) else None
    expected = []
    for row, valid in enumerate(table["mask"]):
        drawn_by = (engine or table["old"])[row]
        gaps = [b - a for a, b, counts in zip(table["now"][row], drawn_by, valid, strict=True) if counts]
        divergence = sum(gaps) / max(len(gaps), 1)
        expected.append([float(advantages[row] >= 0 or divergence <= 0.3171)])
    got = off_policy_mask(
        double(table["now"]),
        double(table["old"]),
        double(advantages)[:, None],
        torch.tensor(table["mask"]),
        None if engine is None else double(engine),
        threshold=0.3171,
    )
    close(got, expected)


# -- all ---------------------------------------------------------------------------------------------------------------


def test_where_the_engine_gives_no_log_probs_corrections_are_1() -> None:
    old, mask = double([[-1.0, -2.0]]), torch.ones(1, 2)
    for weight in (geometric_correction, rejection):
        assert weight(old, mask) is None
    batch = make_batch(advantages=[1.0], log_probs=[[-1.0, -2.0]])
    plain = resolve("grpo", {"kl": None, "token_weight": None}, REGISTRY).loss(batch).loss
    for variant in ("icepop", "geo_is_grpo", "geo_rs_grpo", "k3_rs_grpo", "opsm_grpo", "decoupled_grpo"):
        close(resolve(variant, {"kl": None}, REGISTRY).loss(batch).loss, plain)


def test_icepop_and_decoupled_grpo_by_hand() -> None:
    # r = pi_old / pi_sampler = 2, 6 and .4. IcePop keeps [.5, 5]: 2; the cap of 5: 2 and .4. One sequence: -A w / 3.
    old = double([[-1.0, -1.0, -1.0]])
    engine = old - double([[2.0, 6.0, 0.4]]).log()
    for variant, kept in (("icepop", [2.0, 0.0, 0.0]), ("decoupled_grpo", [2.0, 0.0, 0.4])):
        log_probs = old.clone().requires_grad_()
        batch = make_batch(advantages=[1.0], log_probs=log_probs, old_log_probs=old, sampling_log_probs=engine)
        resolve(variant, {"kl": None}, REGISTRY).loss(batch).loss.backward()
        close(log_probs.grad, [[-w / 3 for w in kept]])


def test_weights_carry_no_gradient() -> None:
    log_probs = double([[-1.0, -2.0]]).requires_grad_()
    mask, engine, negative = torch.ones(1, 2), double([[-1.5, -2.0]]), double([[-1.0]])
    assert not geometric_correction(log_probs, mask, engine).requires_grad
    assert not rejection(log_probs, mask, engine).requires_grad
    assert not off_policy_mask(log_probs, log_probs, negative, mask, engine).requires_grad


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (
            {"name": "geometric_correction", "clip_min": 2, "clip_max": 1.5},
            "'geometric_correction': clip_min (2.0) must be below clip_max (1.5)",
        ),
        (
            {"name": "geometric_correction", "clip_min": 0},
            "'geometric_correction': clip_min (0.0) bounds a ratio, so it must be above 0",
        ),
        (
            {"name": "geometric_correction", "clip_max": None},
            "'geometric_correction': mode 'truncate' needs clip_min or clip_max",
        ),
        ({"name": "rejection", "lower": 0.1}, "'rejection': lower (0.1) is a bound of k1 alone: k3 is never below 0"),
        ({"name": "rejection", "upper": 0}, "'rejection': upper (0.0) must be above 0: k3 is never below 0"),
        (
            {"name": "rejection", "estimator": "k1", "lower": 0.1, "upper": 0.1},
            "'rejection': lower (0.1) must be below upper (0.1)",
        ),
        (
            {"name": "rejection", "estimator": "k1", "level": "seq_max"},
            "'rejection': estimator 'k1' has two signs, and the largest of a sequence says nothing of the other; use "
            "k2 or k3",
        ),
        ({"name": "off_policy_mask", "threshold": -1}, "'off_policy_mask': threshold (-1.0) must not be negative"),
        ({"name": "second_moment_mask", "threshold": 0}, "'second_moment_mask': threshold (0.0) must be above 0"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(weight: dict, message: str) -> None:
    with pytest.raises(VariantError) as error:
        resolve("grpo", {"token_weight": weight}, REGISTRY)
    assert str(error.value) == f"token_weight {message}."
