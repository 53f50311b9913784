"""Properties of a component over time and over processes: ranks, checkpoints, evaluation."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_variants.binding import States
from trl_variants.conformance.inputs import Case
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
    """The outcome of a step whose rows are spread over ranks, each a thread that meets the others where it gathers."""
    leaves, meeting = leaves_of(given), _Meeting(len(cut))
    results: dict[int, LossResult] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            batch = Batch(**micro_batch({**given, **leaves}, cut[rank], len(cut)))
            results[rank] = recipe.loss(batch, gather=lambda tensor: meeting.gather(rank, tensor))
        except threading.BrokenBarrierError:
            pass  # another rank has failed
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(cut))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    loss = sum((results[rank].loss for rank in results), torch.zeros((), dtype=torch.float64))
    return {"loss": loss.detach(), **gradients_of(loss, leaves), **numbers_of(results[0].states)}


class _Meeting:
    """Where ranks exchange tensors; each must come as often as the others."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self._table: list[Tensor | None] = [None] * ranks

    def gather(self, rank: int, tensor: Tensor) -> Tensor:
        self._table[rank] = tensor.detach()
        self.barrier.wait()
        whole = torch.cat([part for part in self._table if part is not None])
        self.barrier.wait()  # before anyone writes again
        return whole


def state_survives_a_checkpoint(subject: Subject) -> bool:
    """Where a component keeps a state: saved after a rollout or a step and loaded again, it goes on the same."""
    if not any("state" in bound.info.inputs for bound in subject.bounds):
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
