"""The properties, one function each.

It returns True where it holds, False where there is nothing to hold to it, or the declaration that excepts the
component from it; and it raises `NonConformance` where it is broken.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trl_variants.binding import Bound, States
from trl_variants.conformance.acting import every_parameter_acts
from trl_variants.conformance.inputs import FLOATS, Case, pick
from trl_variants.conformance.lifetimes import (
    evaluation_changes_nothing,
    ranks_change_nothing,
    state_survives_a_checkpoint,
)
from trl_variants.conformance.running import Subject, bare, joined, outcome, watched
from trl_variants.data import Advantages, Batch, ClipResult, Rollout

__all__ = ["PROPERTIES"]

_JUNK = (float("nan"), float("inf"), -float("inf"), 200.0, -200.0)
_CONSTANTS = (0.0, 0.7, 0.1, 1 / 3, -2.3, 1e4 + 0.1)
#: What comes out once per completion; all else is one number.
_BY_ROW = ("advantages", "returns", "keep", "rewards")


def masked_junk_changes_nothing(subject: Subject) -> bool:
    """What stands at masked positions changes no value and no gradient, in a recipe and in the bare function."""
    for case in subject.cases():
        for given in subject.inputs(case):
            clean = outcome(subject.recipe, given)
            for junk in _JUNK:
                dirty = outcome(subject.recipe, _dirty(given, junk))
                subject.compare(dirty, clean, f"{junk} at masked positions changes something", given)
        for alone, given in subject.bare_inputs(case):
            clean = bare(alone, given)
            for junk in _JUNK:
                message = f"{junk} at masked positions changes what the bare function gives at the others"
                subject.compare(bare(alone, _dirty(given, junk)), clean, message, given)
    return True


def _dirty(given: Mapping[str, Any], junk: float) -> dict[str, Any]:
    mask, out = given["mask"], dict(given)
    for name in FLOATS & given.keys():
        if given[name].dim() == 2:  # (B, 1) counts where the row has a token
            valid = mask if given[name].shape == mask.shape else mask.any(1, keepdim=True)
            out[name] = torch.where(valid, given[name], junk)
    return out


def row_order_decides_nothing(subject: Subject) -> bool:
    """Permuting the rows permutes what is one per completion, and changes nothing else."""
    for case in subject.cases():
        order = torch.tensor([*range(1, case.rows, 2), *range(0, case.rows, 2)])
        for given in subject.inputs(case):
            found = outcome(subject.recipe, given)
            want = {n: v[order] if n in _BY_ROW or n.startswith("gradient") else v for n, v in found.items()}
            got = outcome(subject.recipe, pick(given, order))
            subject.compare(got, want, f"rows in the order {order.tolist()} change something", given, tol=1e-9)
    return True


def constant_groups_get_zero(subject: Subject) -> bool:
    """Where declared ``group_centred``: completions that are equal in all get exactly 0, in float32 too."""
    chain = [b for b in subject.bounds if b.slot in ("advantage_estimator", "advantage_normalizer")]
    if not chain or not all(bound.info.centres_groups(bound.parameters) for bound in chain):
        return False
    least = subject.recipe.min_generations
    size = max(8, least)
    for dtype, constant in itertools.product((torch.float64, torch.float32), _CONSTANTS):
        case = Case((1, least + 1), 3, dtype)
        given = pick(case.rollout(), [*[0] * size, *range(1, case.rows)])
        same = torch.arange(len(given["mask"])) < size
        value = torch.tensor(constant, dtype=dtype)
        given["group_ids"] = (~same).long()
        given["rewards"] = torch.where(same, value, given["rewards"])
        given["rewards_per_func"] = torch.where(same[:, None], value, given["rewards_per_func"])
        advantages = outcome(subject.recipe, given)["advantages"][same]
        if bool((advantages != 0).any()):
            raise subject.fail(f"{size} rewards of {constant} in {dtype} give {advantages.tolist()}, not 0", given)
    return True


def the_cut_changes_no_gradient(subject: Subject) -> bool | str:
    """Cutting a step into micro-batches, trimmed, changes neither gradient nor metrics; not for `batch_statistic`."""
    if not subject.runs_in("learning"):
        return False
    for bound in subject.bounds:
        if bound.info.batch_statistic:
            return f"{bound.name} is declared batch_statistic"
    for case, per_token in itertools.product(subject.cases(), (False, True)):
        given, rows = case.batch(per_token), range(case.rows)
        whole = outcome(subject.recipe, given)
        for cut in ([[i] for i in rows], [[0], [*rows[1:]]], [[*rows[::2]], [*rows[1::2]]]):
            got = joined(subject.recipe, given, cut)
            subject.compare(got, whole, f"the rows cut into {cut} make another step", given, tol=1e-9)
    return True


def the_gradient_on_policy_is_minus_the_advantage(subject: Subject) -> bool | str:
    """At ratio 1 a clip rule's gradient with respect to log pi is -A, and it reports nothing clipped."""
    rule = subject.recipe.clip_rule
    if subject.bound not in (None, rule):
        return False
    if subject.recipe.importance_ratio.info.level == "sequence":
        return f"{subject.recipe.importance_ratio.name} gives every token its sequence's mean gradient"
    on_policy = replace(subject.recipe, kl=None, regularizers=(), token_weights=())
    plain = replace(rule, info=replace(rule.info, function=_plain, inputs=("log_probs", "advantages"), parameters={}))
    reference = replace(on_policy, clip_rule=plain)
    for case, per_token in itertools.product(subject.cases(), (False, True)):
        given = case.batch(per_token)
        given["old_log_probs"] = given["sampling_log_probs"] = given["log_probs"]  # current, old and sampler are one
        got, want = outcome(on_policy, given), outcome(reference, given)
        clipped = {n: float(v) for n, v in got.items() if n.startswith("metric clip_ratio") and abs(float(v)) > 0}
        if clipped:
            raise subject.fail(f"at ratio 1 it reports clipping: {clipped}", given)
        name = "gradient of log_probs"
        subject.compare(got, {name: want[name]}, "at ratio 1 the gradient is not that of -A log pi", given, tol=1e-9)
    return True


def _plain(log_probs: Tensor, advantages: Tensor) -> ClipResult:
    return ClipResult(loss=-advantages * log_probs)


def floats_are_wide(subject: Subject) -> bool:
    """Half-precision inputs reach components as float32; float64 stays, to the end."""
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        seen: set[tuple[str, str, torch.dtype]] = set()

        def watch(bound: Bound, arguments: tuple[Any, ...], call: Callable[[], Any], seen: Any = seen) -> Any:
            for name, value in zip(bound.info.inputs, arguments, strict=True):
                if isinstance(value, Tensor) and value.is_floating_point():
                    seen.add((str(bound), name, value.dtype))
            return call()

        for case in subject.cases(dtype):
            for given in subject.inputs(case):
                found = outcome(watched(subject.recipe, watch), given)
                for component, name, got in seen:
                    if got != wanted:
                        raise subject.fail(f"with {dtype} given, {name} reaches {component} as {got}", given)
                for name in ("advantages", "rewards", "loss"):
                    if name in found and found[name].dtype != wanted:
                        raise subject.fail(f"with {dtype} given, {name} comes out as {found[name].dtype}", given)
    return True


def extremes_are_finite(subject: Subject) -> bool:
    """Log-ratios of +-200 and KL differences of +-100 give finite values and gradients."""
    for kl, advantage in itertools.product((100.0, -100.0), (1.0, -1.0)):
        for case in subject.cases(torch.float32):
            for given in subject.inputs(case):
                turn = torch.where(torch.arange(case.rows) % 2 == 0, 1.0, -1.0)[:, None]  # +200, -200, +200, ...
                less = {"old_log_probs": 200.0, "sampling_log_probs": 200.0, "ref_log_probs": kl}
                given |= {name: given["log_probs"] - by * turn for name, by in less.items() if name in given}
                if "advantages" in given:
                    given["advantages"] = torch.full_like(given["advantages"], advantage)
                for name, value in outcome(subject.recipe, given).items():
                    if not name.startswith(("metric", "state")) and not value.isfinite().all():
                        message = "at log-ratios of +-200 and KL differences of +-100"
                        raise subject.fail(f"{message}, {name} is not finite: {value.tolist()}", given)
    return True


def unscored_rows_count_for_nothing(subject: Subject) -> bool:
    """A completion without any reward gets 0, and the others get what they get without it."""
    if not subject.runs_in("rollout"):
        return False
    for case in subject.cases():
        every = torch.arange(case.rows)
        for unscored in ([0], [0, case.rows - 1], [*range(1, case.rows)], [*range(case.rows)]):
            given = case.rollout()
            given["scored"] = scored = ~torch.isin(every, torch.tensor(unscored))
            given["rewards"] = torch.where(scored, given["rewards"], torch.nan)
            given["rewards_per_func"] = torch.where(scored[:, None], given["rewards_per_func"], torch.nan)
            found = outcome(subject.recipe, given)
            if bool((found["advantages"][~scored] != 0).any()):
                raise subject.fail(f"rows {unscored} have no reward and get {found['advantages'].tolist()}", given)
            if scored.any():
                without = outcome(subject.recipe, pick(given, every[scored]))
                # KL is measured on every completion, so a controller's state may change.
                kept = [n for n in without if n.startswith("state") and not n.startswith("state kl_controller")]
                want = {name: without[name] for name in ("advantages", "keep", *kept)}
                got = {**found, **{name: found[name][scored] for name in ("advantages", "keep")}}
                subject.compare(got, want, f"rows {unscored} have no reward and change the others", given, tol=1e-9)
    return True


def inputs_and_states_are_left_alone(subject: Subject) -> bool:
    """Nothing that is passed in is changed in place, and the same inputs and states give the same result."""

    def watch(bound: Bound, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        before = [copy.deepcopy(a.detach() if isinstance(a, Tensor) else a) for a in arguments]
        result = call()
        for name, old, new in zip(bound.info.inputs, before, arguments, strict=True):
            if not _equal(old, new):
                raise subject.fail(f"its input {name} was {old} and is {new} after the call", {})
        return result

    recipe = watched(subject.recipe, watch)
    for case in subject.cases():
        for given in subject.inputs(case):
            states: States = {}
            for _ in range(2):
                first = outcome(recipe, given, states)
                again = outcome(recipe, given, states)
                subject.compare(again, first, "the same inputs and states give another result", given)
                if "group_ids" in given:
                    states = recipe.advantages(Rollout(**given), states=states).states
                else:
                    states = recipe.loss(Batch(**given), states=states).states
                    given = {**given, "step": given["step"] + 1}
    return True


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor):
        return isinstance(new, Tensor) and torch.equal(old.nan_to_num(), new.detach().nan_to_num())
    if isinstance(old, Advantages):
        return _equal(vars(old), vars(new))
    if isinstance(old, list):
        return isinstance(new, list) and len(old) == len(new) and all(map(_equal, old, new))
    if isinstance(old, dict):
        return isinstance(new, dict) and old.keys() == new.keys() and all(_equal(old[k], new[k]) for k in old)
    return callable(old) or bool(old == new)


#: All of them, in the order in which they are checked.
PROPERTIES: tuple[Callable[[Subject], bool | str], ...] = (
    masked_junk_changes_nothing,
    row_order_decides_nothing,
    constant_groups_get_zero,
    the_cut_changes_no_gradient,
    ranks_change_nothing,
    the_gradient_on_policy_is_minus_the_advantage,
    floats_are_wide,
    extremes_are_finite,
    unscored_rows_count_for_nothing,
    inputs_and_states_are_left_alone,
    state_survives_a_checkpoint,
    evaluation_changes_nothing,
    every_parameter_acts,
)
