"""The properties, one function each.

It returns True where it holds, False where there is nothing to hold to it, or the declaration that excepts the
component from it; and it raises `NonConformance` where it is broken.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trl_variants.binding import Bound, States
from trl_variants.conformance.acting import every_input_acts, every_parameter_acts
from trl_variants.conformance.gradients import (
    a_kl_is_a_divergence,
    clips_are_reported_where_they_bind,
    the_gradient_on_policy_is_minus_the_advantage,
)
from trl_variants.conformance.inputs import FLOATS, pick
from trl_variants.conformance.lifetimes import (
    evaluation_changes_nothing,
    ranks_change_nothing,
    state_survives_a_checkpoint,
)
from trl_variants.conformance.rollouts import (
    constant_groups_get_zero,
    dropped_groups_count_for_nothing,
    labels_of_groups_decide_nothing,
    unscored_rows_count_for_nothing,
)
from trl_variants.conformance.running import Outcome, Subject, bare, joined, outcome, watched
from trl_variants.data import Advantages, Batch, Rollout

__all__ = ["PROPERTIES"]

_JUNK = (float("nan"), float("inf"), -float("inf"), 200.0, -200.0)
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
            want, got = _sorted_states(want), _sorted_states(got)
            subject.compare(got, want, f"rows in the order {order.tolist()} change something", given, tol=1e-9)
    return True


def _sorted_states(found: Outcome) -> Outcome:
    """With what a state has collected in order: what it holds counts, not in which order it came."""
    return {n: v.flatten().sort().values if n.startswith("state") else v for n, v in found.items()}


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


def floats_are_wide(subject: Subject) -> bool:
    """Half-precision inputs reach components as float32, float64 stays to the end, and nobody narrows them between."""
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        seen: set[tuple[str, str, torch.dtype]] = set()

        def watch(
            bound: Bound, arguments: tuple[Any, ...], call: Callable[[], Any], seen: Any = seen, dtype: Any = dtype
        ) -> Any:
            for name, value in zip(bound.info.inputs, arguments, strict=True):
                if isinstance(value, Tensor) and value.is_floating_point():
                    seen.add((str(bound), name, value.dtype))
            with _Narrowing() as narrowing:  # type: ignore[no-untyped-call]
                result = call()
            if narrowing.found and not bound.parts:
                raise subject.fail(f"with {dtype} given, {bound.name} makes {narrowing.found}", {})
            return result

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


class _Narrowing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes a floating-point tensor that is converted to a narrower type."""

    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point() and result.is_floating_point():
            old, new = args[0].dtype, result.dtype
            if torch.finfo(new).eps > torch.finfo(old).eps:
                self.found = f"{old} into {new}"
        return result


def extremes_are_finite(subject: Subject) -> bool:
    """Values and gradients are finite at extreme but valid inputs, such as log-ratios of +-200 and entropies of 0."""
    for case in subject.cases(torch.float32):
        for given in subject.inputs(case):
            for what, extreme in _extremes(given):
                for name, value in outcome(subject.recipe, extreme).items():
                    if not name.startswith(("metric", "state")) and not value.isfinite().all():
                        raise subject.fail(f"at {what}, {name} is not finite: {value.tolist()}", extreme)
    return True


def _extremes(given: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Extreme inputs made from ordinary ones, each with its name."""
    rows = len(given["mask"])
    turn = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)  # +, -, +, ...

    def filled(**values: float) -> dict[str, Any]:
        return {**given, **{n: torch.full_like(given[n], v) for n, v in values.items() if n in given}}

    for kl, advantage in itertools.product((100.0, -100.0), (1.0, -1.0)):
        less = {"old_log_probs": 200.0, "sampling_log_probs": 200.0, "ref_log_probs": kl}
        away = {n: given["log_probs"] - by * turn[:, None] for n, by in less.items() if n in given}
        learning = {"advantages": torch.full_like(given["advantages"], advantage)} if "advantages" in given else {}
        yield "log-ratios of +-200 and KL differences of +-100", {**given, **away, **learning}
    yield "advantages of 0", filled(advantages=0.0)
    names = ("log_probs", "old_log_probs", "ref_log_probs", "sampling_log_probs")
    yield "tokens that are certain", filled(entropies=0.0, **dict.fromkeys(names, 0.0))
    yield "entropies of 12 nats", filled(entropies=12.0, **dict.fromkeys(names, -12.0))
    yield "values of 0", filled(values=0.0, old_values=0.0, returns=0.0, final_values=0.0)
    if "rewards_per_func" in given:
        for what, value in (("equal rewards of 0", 0.0 * turn), ("rewards of +-10000", 1e4 * turn)):
            rewards = {"rewards": value, "rewards_per_func": value[:, None].expand(rows, 2).clone()}
            yield what, {**given, **rewards, **({"greedy_rewards": -value} if "greedy_rewards" in given else {})}


def inputs_and_states_are_left_alone(subject: Subject) -> bool:
    """Nothing that is passed in, or the process's own, is changed, and the same inputs and states give the same."""

    def watch(bound: Bound, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        before = [copy.deepcopy(a.detach() if isinstance(a, Tensor) else a) for a in arguments]
        around = _surroundings()
        result = call()
        for what, old in around.items():
            if not _equal(old, _surroundings()[what]):
                raise subject.fail(f"{bound.name} changes {what}, and with it what others do", {})
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


def _surroundings() -> dict[str, Any]:
    """What belongs to the whole process, by what it is."""
    return {
        "the state of torch's random numbers": torch.get_rng_state(),
        "the state of Python's random numbers": random.getstate(),
        "torch's default dtype": torch.get_default_dtype(),
        "whether gradients are recorded": torch.is_grad_enabled(),
    }


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
    labels_of_groups_decide_nothing,
    constant_groups_get_zero,
    the_cut_changes_no_gradient,
    ranks_change_nothing,
    the_gradient_on_policy_is_minus_the_advantage,
    clips_are_reported_where_they_bind,
    a_kl_is_a_divergence,
    floats_are_wide,
    extremes_are_finite,
    unscored_rows_count_for_nothing,
    dropped_groups_count_for_nothing,
    inputs_and_states_are_left_alone,
    state_survives_a_checkpoint,
    evaluation_changes_nothing,
    every_input_acts,
    every_parameter_acts,
)
