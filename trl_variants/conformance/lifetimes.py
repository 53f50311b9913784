"""Properties of a component over time and over processes: ranks, checkpoints, evaluation."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trl_variants.binding import States
from trl_variants.conformance.inputs import Case
from trl_variants.conformance.ranks import on_ranks
from trl_variants.conformance.running import Outcome, Subject, gradients_of, leaves_of, micro_batch, numbers_of, outcome
from trl_variants.data import Batch, Rollout
from trl_variants.recipe import LossResult, Recipe

__all__ = ["evaluation_changes_nothing", "later", "ranks_change_nothing", "state_survives_a_checkpoint"]


def ranks_change_nothing(subject: Subject) -> bool | str:
    """A step spread over two processes has the loss and the gradient of one."""
    if not subject.runs_in("learning"):
        return False  # a rollout is that of all processes anyway
    for bound in subject.bounds:
        if bound.info.batch_statistic and "gather" not in bound.info.inputs:
            return f"{bound.name} is declared batch_statistic, and gathers nothing"
    for case, per_token in itertools.product(subject.cases(), (False, True)):
        given, rows = case.batch(per_token), range(case.rows)
        whole = outcome(subject.recipe, given)
        want = {name: value for name, value in whole.items() if not name.startswith("metric")}
        for cut in ([[0], [*rows[1:]]], [[*rows[::2]], [*rows[1::2]]]):
            got = _on_ranks(subject.recipe, given, cut)
            subject.compare(got, want, f"rows {cut[0]} and {cut[1]} on two ranks make another step", given, tol=1e-9)
    return True


def _on_ranks(recipe: Recipe, given: Mapping[str, Any], cut: Sequence[Sequence[int]]) -> Outcome:
    """The outcome of a step whose rows are spread over ranks."""
    leaves = leaves_of(given)
    parts = [Batch(**micro_batch({**given, **leaves}, rows, len(cut))) for rows in cut]
    results = on_ranks([partial(_loss, recipe, part) for part in parts])
    loss = sum((result.loss for result in results), torch.zeros((), dtype=torch.float64))
    return {"loss": loss.detach(), **gradients_of(loss, leaves), **numbers_of(results[0].states)}


def _loss(recipe: Recipe, batch: Batch, gather: Callable[[Tensor], Tensor]) -> LossResult:
    return recipe.loss(batch, gather=gather)


def state_survives_a_checkpoint(subject: Subject) -> bool:
    """Where a component keeps a state: saved after a rollout or a step and loaded again, it goes on the same."""
    if not any("state" in inner.info.inputs for bound in subject.bounds for inner in bound.with_parts):
        return False
    for case in subject.cases():
        for given in subject.inputs(case):
            states = _after(subject.recipe, given, {})
            file = io.BytesIO()
            torch.save(dict(states), file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            want, got = (outcome(subject.recipe, _next(given), s) for s in (states, loaded))
            subject.compare(got, want, "it goes on differently after its state was saved and loaded", given)
    return True


def evaluation_changes_nothing(subject: Subject) -> bool:
    """Other inputs in between, as an evaluation has them, leave no trace in what training does."""
    for case in subject.cases():
        other = next(subject.cases()) if case.rows > 2 else Case((case.rows + 1,), case.width)
        for given, between in zip(subject.inputs(case), subject.inputs(other), strict=False):
            states = _after(subject.recipe, given, {})
            want = outcome(subject.recipe, _next(given), states)
            again = _after(subject.recipe, given, {})
            outcome(subject.recipe, between, again)  # whose new state is dropped
            got = outcome(subject.recipe, _next(given), again)
            subject.compare(got, want, "an evaluation in between changes what training does", given)
    return True


def later(recipe: Recipe, given: Mapping[str, Any]) -> Outcome:
    """What comes out of the same inputs a rollout or an optimizer step later."""
    return outcome(recipe, _next(given), _after(recipe, given, {}))


def _after(recipe: Recipe, given: Mapping[str, Any], states: States) -> States:
    if "group_ids" in given:
        return recipe.advantages(Rollout(**given), states=states).states
    return recipe.loss(Batch(**given), states=states).states


def _next(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs one optimizer step later."""
    return {**given, "step": given["step"] + 1} if "step" in given else dict(given)
