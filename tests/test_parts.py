"""An estimator made of other estimators: bound, validated, run and described like any component."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from tests.components.common import close
from trl_variants import Advantages, VariantError, component, hookimpl, resolve, use
from trl_variants.describe import recipe_dict, table_row
from trl_variants.objective import formula_text
from trl_variants.registry import Owner, load_registry
from trl_variants.testing import make_rollout

SEEN: list[str] = []


@component
def total(part_advantages: list[Advantages], *, parts: list[Any] = []) -> Tensor:  # noqa: B006
    return sum(part.advantages for part in part_advantages)  # type: ignore[return-value]


@component(formula=r"\hat A_i = r_i - \bar r")
def counted_mean(rewards: Tensor, scored: Tensor, state: dict, *, step: float = 1.0) -> tuple[Tensor, dict]:
    """Adds what it has counted, so that its state shows."""
    seen = state.get("seen", 0.0) + step
    return rewards * 0 + seen, {"seen": seen}


@component
def seen_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    SEEN.append("kl")
    return log_probs - ref_log_probs


MEAN, STD = {"advantage_estimator": "group_mean"}, {"advantage_normalizer": "group_std"}


def recipe(*parts: Any, **overrides: Any) -> Any:
    overrides = {"advantage_estimator": use(total, parts=list(parts)), "advantage_normalizer": "none", **overrides}
    return resolve("grpo", overrides, load_registry("none"))


def test_each_part_has_its_own_normalizers() -> None:
    # rewards 1 0 0 0: mean 1/4, population std sqrt(3)/4, so that grpo's are 1.7321 and -.5774; plus the centred ones
    made = recipe({**MEAN, "advantage_normalizer": {"name": "group_std", "eps": 0.0}}, MEAN)
    got = made.advantages(make_rollout([1.0, 0.0, 0.0, 0.0])).advantages
    close(got, [3**0.5 + 0.75] + [-(3**-0.5) - 0.25] * 3)


def test_normalizers_follow_each_other_and_the_sum_has_its_own() -> None:
    twice = {"name": "batch_std", "level": "completion", "eps": 0.0}
    made = recipe({**MEAN, "advantage_normalizer": ["group_std", twice]}, advantage_normalizer=twice)
    got = made.advantages(make_rollout([3.0, 1.0])).advantages  # whitened again is the same
    close(got, [1.0, -1.0])
    assert [bound.name for bound in made.components if bound.slot.startswith("advantage")][:4] == [
        "group_mean",
        "group_std",
        "batch_std",
        "total",
    ]


def test_unscored_rows_and_needs_of_parts_count() -> None:
    made = recipe(MEAN, {"advantage_estimator": "returns"})
    assert made.min_generations == 2
    got = made.advantages(make_rollout([3.0, 1.0, 9.0], scored=[True, True, False])).advantages
    close(got, [4.0, 0.0, 0.0])
    with pytest.raises(VariantError, match="advantage_estimator 'gae' needs values, and variant 'grpo' has no critic"):
        recipe({"advantage_estimator": "gae"})
    assert recipe({"advantage_estimator": "gae"}, critic="shared").needs("values")


def test_what_the_parts_read_is_computed_once() -> None:
    kl = {"estimator": use(seen_kl), "placement": "sequence_reward", "coef": 0.1}
    made = recipe({"advantage_estimator": "returns"}, {"advantage_estimator": "returns"}, kl=kl)
    SEEN.clear()
    rollout = make_rollout([1.0, 2.0], log_probs=[[-1.0], [-1.0]], ref_log_probs=[[-2.0], [-1.0]])
    close(made.advantages(rollout).advantages, [1.8, 4.0])
    assert SEEN == ["kl"]


def test_two_parts_of_one_component_keep_their_states_apart() -> None:
    slow, fast = use(counted_mean, step=1.0), use(counted_mean, step=10.0)
    made = recipe({"advantage_estimator": slow}, {"advantage_estimator": fast})
    first = made.advantages(make_rollout([0.0, 0.0]))
    second = made.advantages(make_rollout([0.0, 0.0]), states=first.states)
    close(second.advantages, [22.0, 22.0])
    assert {key: state["seen"] for key, state in second.states.items()} == {
        "advantage_estimator.part 1.counted_mean": 2.0,
        "advantage_estimator.part 2.counted_mean": 20.0,
    }


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (3, "part 1: it must be a mapping with the keys advantage_estimator, advantage_normalizer, not 3"),
        ({"advantage_estimtor": "gae"}, "has no key 'advantage_estimtor'. Did you mean 'advantage_estimator'?"),
        (STD, "part 1: it has no advantage_estimator"),
        (
            {"advantage_estimator": "group_maen"},
            "named 'group_maen'. Did you mean 'group_mean'?",
        ),
        ({"advantage_estimator": ["returns"]}, "advantage_estimator takes one component, not a list"),
        (
            {**MEAN, "advantage_normalizer": ["group_std", "group_std"]},
            "lists 'group_std' more than once",
        ),
        (
            {"advantage_estimator": {"name": "returns", "base": 1}},
            "advantage_estimator 'returns' has no parameter 'base'. Did you mean 'baseline'?",
        ),
    ],
)
def test_a_wrong_part_is_named(part: Any, message: str) -> None:
    with pytest.raises(VariantError) as error:
        recipe(part)
    assert message in str(error.value)


def test_a_component_that_names_part_advantages_must_take_parts() -> None:
    @component
    def lacks(part_advantages: list[Advantages]) -> Tensor:
        return part_advantages[0].advantages

    with pytest.raises(VariantError, match="'lacks' names part_advantages, so it must have a parameter parts"):
        resolve("grpo", {"advantage_estimator": lacks}, load_registry("none"))


def test_parts_are_described_and_written_as_formulas() -> None:
    made = recipe({**MEAN, **STD}, {"advantage_estimator": "returns"})
    said = recipe_dict(made)["slots"]["advantage_estimator"]
    assert [[inner["component"] for inner in part] for part in said["parts"]] == [
        ["group_mean", "group_std"],
        ["returns"],
    ]
    assert said["parts"][0][0]["distribution"] == "trl-variants"
    lines = formula_text(made)
    assert "Â⁽¹⁾ᵢ = rᵢ - mean(r₁, …, r_G)" in lines and "Â⁽²⁾ᵢ = rᵢ - 0" in lines


def test_a_part_inside_a_part_keeps_a_state_of_its_own() -> None:
    inner = {"advantage_estimator": use(total, parts=[{"advantage_estimator": counted_mean}])}
    made = recipe({"advantage_estimator": use(counted_mean, step=10.0)}, inner)
    result = made.advantages(make_rollout([1.0, 0.0]))
    close(result.advantages, [11.0, 11.0])
    result = made.advantages(make_rollout([1.0, 0.0]), states=result.states)
    close(result.advantages, [22.0, 22.0])
    assert {key: state["seen"] for key, state in result.states.items()} == {
        "advantage_estimator.part 1.counted_mean": 20.0,
        "advantage_estimator.part 2.part 1.counted_mean": 2.0,
    }


def test_parts_given_as_objects_are_written_as_a_config_would() -> None:
    made = recipe(
        {
            "advantage_estimator": use(counted_mean, step=3.0),
            "advantage_normalizer": [use("batch_std", level="completion"), "group_std"],
        },
        {"advantage_estimator": use("group_mean"), "advantage_normalizer": use("group_std")},
    )
    assert recipe_dict(made)["slots"]["advantage_estimator"]["parameters"]["parts"] == [
        {
            "advantage_estimator": {"name": "counted_mean", "step": 3.0},
            "advantage_normalizer": [{"name": "batch_std", "level": "completion"}, "group_std"],
        },
        {"advantage_estimator": "group_mean", "advantage_normalizer": "group_std"},
    ]
    assert table_row(made)["baseline"] == (
        "total parts=[counted_mean step=3 → batch_std level=completion → group_std, group_mean → group_std]"
    )


def test_the_formula_of_a_part_inside_a_part_is_numbered_after_both() -> None:
    inner = {"advantage_estimator": use(total, parts=[MEAN, {**MEAN, "advantage_normalizer": "group_std"}])}
    lines = formula_text(recipe(MEAN, inner))
    assert [line.split(" ")[0] for line in lines if line.startswith("Â")] == [
        "Âᵢₜ",
        "Â⁽¹⁾ᵢ",
        "Â⁽²⁾ᵢₜ",
        "Â⁽²⁾⁽¹⁾ᵢ",
        "Â⁽²⁾⁽²⁾ᵢ",
        "Â⁽²⁾⁽²⁾ᵢ",
    ]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (use(total, parts=[{"advantage_estimator": "grop_mean"}]), "part 1: .*'total', part 1: No .* 'grop_mean'. Did"),
        ({"gamma": 1.0}, "'total', part 1: advantage_estimator is empty here, so the override must name a component"),
        (use("gae", lam=float("inf")), "'total', part 1: advantage_estimator 'gae': lam must be finite, not inf"),
    ],
)
def test_what_is_wrong_in_a_part_is_said_with_its_place(part: Any, message: str) -> None:
    with pytest.raises(VariantError, match=message):
        recipe({"advantage_estimator": part})


def test_parts_that_hold_themselves_are_refused() -> None:
    endless: dict[str, Any] = {"name": "total"}
    endless["parts"] = [{"advantage_estimator": endless}]
    registry = load_registry("none")
    registry.add(SimpleNamespace(register_advantage_estimators=hookimpl(lambda: [total])), Owner("t", "t", ""))
    with pytest.raises(VariantError, match="'total' holds parts of parts more than 8 deep."):
        resolve("grpo", {"advantage_estimator": endless}, registry)
