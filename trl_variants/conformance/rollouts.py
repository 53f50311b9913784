"""Properties of the rollout phase: which rows count for what."""

from __future__ import annotations

import itertools

import torch

from trl_variants.conformance.inputs import Case, pick
from trl_variants.conformance.running import Subject, outcome, runs

__all__ = [
    "constant_groups_get_zero",
    "dropped_groups_count_for_nothing",
    "labels_of_groups_decide_nothing",
    "unscored_rows_count_for_nothing",
]

_CONSTANTS = (0.0, 0.7, 0.1, 1 / 3, -2.3, 1e4 + 0.1)


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
            fewer = pick(given, every[scored])
            # A component may refuse prompts with fewer completions than it says it needs.
            if not scored.any() or (subject.recipe.min_generations > 1 and not runs(outcome, subject.recipe, fewer)):
                continue
            without = outcome(subject.recipe, fewer)
            # KL is measured on every completion, so a controller's state may change.
            kept = [n for n in without if n.startswith("state") and not n.startswith("state kl_controller")]
            want = {name: without[name] for name in ("advantages", "keep", *kept)}
            got = {**found, **{name: found[name][scored] for name in ("advantages", "keep")}}
            subject.compare(got, want, f"rows {unscored} have no reward and change the others", given, tol=1e-9)
    return True


def dropped_groups_count_for_nothing(subject: Subject) -> bool:
    """What a sample filter drops, whole prompts at a time, changes nothing for the other prompts' completions."""
    if not subject.runs_in("rollout"):
        return False
    for case in subject.cases():
        given = case.rollout()
        for group in range(len(case.groups) if len(case.groups) > 1 else 0):
            keep = given["group_ids"] != group
            found = outcome(subject.recipe, given, keep=keep)["advantages"][keep]
            fewer = pick(given, keep.nonzero()[:, 0])
            want = outcome(subject.recipe, fewer, keep=keep[keep])["advantages"]
            message = f"the rows of prompt {group} are dropped, and change those of the others"
            subject.compare({"advantages": found}, {"advantages": want}, message, given, tol=1e-9)
    return True


def labels_of_groups_decide_nothing(subject: Subject) -> bool:
    """Which number stands for a prompt changes nothing."""
    if not subject.runs_in("rollout"):
        return False
    for case in subject.cases():
        given = case.rollout()
        want = outcome(subject.recipe, given)
        for name, labels in (("reversed", -given["group_ids"]), ("other", 7 + 5 * given["group_ids"])):
            got = outcome(subject.recipe, {**given, "group_ids": labels - min(int(labels.min()), 0)})
            subject.compare(got, want, f"{name} numbers for the same prompts change something", given, tol=1e-9)
    return True
