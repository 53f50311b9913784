"""Two processes do what one does on the same rows: one launch of torchrun runs every case of ``parallel.py``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from tests.trainer import parallel
from trl_variants import load_registry, resolve


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    parallel.launch("tests.trainer.parallel", folder)
    return folder


@pytest.fixture(params=parallel.CASES)
def runs_of(request: Any, launched: Path, tmp_path: Any, monkeypatch: Any) -> tuple[Any, Any, Any]:
    """One process, and both ranks of two."""
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    alone = parallel.run(request.param, tmp_path, per_device=2, accumulation=4)
    ranks = [torch.load(launched / f"{request.param}-{rank}.pt", weights_only=False) for rank in (0, 1)]
    return alone, *ranks


def assert_close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance * max(1.0, float(a.abs().max())), rtol=0)


def assert_same_numbers(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if value is None or b[name] is None:
            assert value is b[name], name
        else:
            assert b[name] == pytest.approx(value, abs=2e-5, rel=2e-5), name


def test_two_processes_give_the_numbers_of_one(runs_of: tuple[Any, Any, Any]) -> None:
    alone, first, second = runs_of
    assert (alone["processes"], first["processes"], second["processes"]) == (1, 2, 2)
    assert first["kind"] == second["kind"] == "DistributedType.MULTI_CPU"
    # Both ranks have the same advantages of the whole rollout, and each its own rows at its own width.
    for rank, mine in enumerate((first, second)):
        assert torch.equal(mine["mask"], alone["mask"])
        assert_close(alone["advantages"], mine["advantages"], 1e-6)
        count, width = mine["own_mask"].shape
        rows = slice(count * rank, count * (rank + 1))
        trained = alone["advantages"]  # of what is trained on; rows that only fill a rollout up have 0
        expected = torch.cat([trained, trained.new_zeros(2 * count - len(trained), *trained.shape[1:])])[rows]
        assert_close(expected if expected.dim() == 1 else expected[:, :width], mine["own_advantages"], 1e-6)
        assert mine["table"] == pytest.approx(alone["table"], abs=1e-5)
    # The ranks hold very different numbers of tokens.
    widths = sorted(mine["own_mask"].shape[1] for mine in (first, second))
    tokens = sorted(float(mine["own_mask"].sum()) for mine in (first, second))
    if alone["mask"].shape[1] == 12 and widths[0] != widths[1]:
        assert widths == [3, 12] and tokens[1] > 3 * tokens[0]
    # Gradients, metrics and weights of every step.
    assert len(alone["gradients"]) >= 3 and max(float(g.norm()) for g in alone["gradients"] if g is not None) > 0
    for mine in (first, second):
        for kind in ("gradients", "critic_gradients"):
            for a, b in zip(alone[kind], mine[kind], strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert_close(a, b)
        assert_close(alone["weights"], mine["weights"])
        assert_close(alone["critic"], mine["critic"])
        assert mine["kl_coef"] == pytest.approx(alone["kl_coef"], rel=1e-6)
        assert mine["states"].keys() == alone["states"].keys()
        for key, state in alone["states"].items():
            assert_same_numbers(state, mine["states"][key])
    # Metrics are joined exactly: each is that of one process, not a mean of means (pains F08).
    for a, b in zip(alone["logs"], first["logs"], strict=True):
        assert_same_numbers(a, b)
    for mine in (first, second):
        assert all(value is None or math.isfinite(value) for value in mine["evaluation"].values())


def test_the_cases_hold_every_registered_aggregator_and_every_placement_of_kl() -> None:
    registry = load_registry("none")
    recipes = [resolve(v, s.get("overrides"), registry) for v, s in parallel.CASES.values()]
    aggregators = {name for name in registry.components("loss_aggregator")}
    assert {recipe.loss_aggregator.name for recipe in recipes} == aggregators
    placements = {name for name in registry.components("kl_placement")}
    assert {recipe.kl.placement.name for recipe in recipes if recipe.kl} == placements


def test_the_cases_put_unequal_tokens_and_split_groups_on_the_ranks(launched: Path) -> None:
    first, second = (torch.load(launched / f"grpo-{rank}.pt", weights_only=False) for rank in (0, 1))
    assert sorted((first["own_mask"].shape[1], second["own_mask"].shape[1])) == [3, 12]
    tokens = torch.load(launched / "reinforce_pp-0.pt", weights_only=False)
    assert tokens["advantages"].shape == tokens["mask"].shape and tokens["own_advantages"].dim() == 2
    split = torch.load(launched / "split_group-0.pt", weights_only=False)
    assert abs(float(split["advantages"].sum())) < 1e-4 < abs(float(split["own_advantages"].sum()))


def test_a_run_of_two_processes_goes_on_exactly(launched: Path) -> None:
    for rank in (0, 1):
        for name in ("resumed", "resumed-critic", "resumed-sampling"):
            whole, again = torch.load(launched / f"{name}-{rank}.pt")
            assert torch.equal(whole, again)


@pytest.mark.parametrize("name", [name for name in parallel.CASES if name.startswith("resampled")])
def test_the_cases_resample_in_several_rounds_and_carry(name: str, launched: Path) -> None:
    ranks = [torch.load(launched / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]
    log = [entry for entry in ranks[0]["logs"] if "sampling/rounds" in entry]
    if name == "resampled_short":  # one round each: (0 1 2) (3 4 5) (6 7 8) (9 10 11)
        assert [entry["sampling/trained_groups"] for entry in log] == [2, 1, 2, 3]
        return
    assert [entry["sampling/rounds"] for entry in log[:3]] == [2, 2, 1]
    assert [entry["sampling/carried_groups"] for entry in log[:3]] == [0, 0, 2]
    # Two groups are 8 rows: 6 on the first process, 2 on the second.
    assert [int(rank["own_carried"][2].sum()) for rank in ranks] == [6, 2]


def test_what_a_component_gathers_may_have_other_rows_on_each_rank(launched: Path) -> None:
    for rank in (0, 1):  # the first has no row of the first tensor, two of the second
        none, some, one = torch.load(launched / f"gathered-{rank}.pt")
        assert none.tolist() == [0, 1, 2]
        assert some.tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
        assert one.tolist() == [0, 1]


def test_the_cases_warm_up_and_stop(launched: Path) -> None:
    steps = {name: torch.load(launched / f"{name}-1.pt", weights_only=False) for name in ("warm_up", "target_kl")}
    none = {name: [gradient is None for gradient in step["gradients"]] for name, step in steps.items()}
    assert none == {"warm_up": [True, True, False], "target_kl": [False, False, True]}
    assert [g is None for g in steps["warm_up"]["critic_gradients"]] == [False, False, False]
    assert [g is None for g in steps["target_kl"]["critic_gradients"]] == [False, False, True]
