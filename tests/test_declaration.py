"""``@component``: what a signature must be, and how parameters are bound; whole error texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Optional

import pytest
from torch import Tensor

from trl_variants import VariantError, component, resolve
from trl_variants.components.clip_rules import ppo_clip
from trl_variants.declaration import info_of
from trl_variants.errors import did_you_mean, listing


@component(
    name="scaled",
    paper="https://example.org/paper",
    formula=r"{factor} A",
    check=lambda p: p.factor > 0 or f"factor ({p.factor}) must be above 0",
    min_generations=2,
    group_centred=True,
)
def scale(
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    factor: float = 0.5,
    count: int = 3,
    on: bool = False,
    level: Literal["token", "sequence"] = "token",
    bound: float | None = None,
    weighted: bool | Literal["detached"] = False,
    old_style: Optional[int] = None,  # noqa: UP045
    label: str = "x",
) -> Tensor:
    """Multiply advantages by a factor.

    More about it.
    """
    return factor * advantages


INFO = info_of(scale)


def bound(**given: Any) -> dict[str, Any]:
    return INFO.bind("advantage_normalizer", given, {})


def test_a_component_stays_an_ordinary_function() -> None:
    assert scale(4.0) == 2.0
    assert scale(4.0, factor=2.0) == 8.0
    assert scale.__name__ == "scale"


def test_what_the_decorator_and_the_signature_say_is_recorded() -> None:
    assert INFO.name == "scaled"
    assert INFO.inputs == ("advantages", "mask")
    assert INFO.optional_inputs == {"mask"}
    assert INFO.needs("advantages")
    assert not INFO.needs("mask")
    assert INFO.summary == "Multiply advantages by a factor."
    assert (INFO.min_generations, INFO.group_centred, INFO.batch_statistic, INFO.after_kl) == (2, True, False, False)
    assert INFO.parameters["factor"].default == 0.5


def test_the_least_generations_may_depend_on_a_parameter() -> None:
    @component(min_generations=lambda p: 2 * p.k)
    def best_of(rewards: Tensor, *, k: int = 3) -> Tensor:
        return rewards / k

    assert info_of(best_of).least_generations() == 6
    recipe = resolve("grpo", {"advantage_estimator": {"name": best_of, "k": 4}, "advantage_normalizer": None})
    assert (recipe.min_generations, recipe.advantage_estimator.min_generations) == (8, 8)
    recipe.check_generations(8)
    with pytest.raises(VariantError) as error:
        recipe.check_generations(7)
    assert str(error.value) == (
        "advantage_estimator 'best_of' needs at least 8 generations per prompt; num_generations is 7."
    )


def test_the_bare_decorator_takes_name_and_defaults_from_the_function() -> None:
    @component
    def plain(rewards: Tensor) -> Tensor:
        return rewards

    assert info_of(plain).name == "plain"
    assert dict(info_of(plain).parameters) == {}


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("1e-6", "factor", 1e-6),  # pains G11: YAML 1.1 reads 1e-6 as a string
        ("3e-4", "factor", 3e-4),
        (2, "factor", 2.0),
        ("7", "count", 7),
        (5.0, "count", 5),
        (True, "on", True),
        ("false", "on", False),
        ("sequence", "level", "sequence"),
        (None, "bound", None),
        ("2.5", "bound", 2.5),
        (True, "weighted", True),
        ("detached", "weighted", "detached"),
        (None, "old_style", None),
        (4, "old_style", 4),
        ("name", "label", "name"),
    ],
)
def test_values_become_the_parameters_type(given: object, key: str, value: object) -> None:
    converted = bound(**{key: given})[key]
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("given", "key", "message"),
    [
        ("abc", "factor", "factor must be a number, not 'abc'."),
        (True, "factor", "factor must be a number, not True."),  # a bool is not taken for a number
        (False, "count", "count must be a whole number, not False."),
        (True, "bound", "bound must be a number or null, not True."),
        (None, "factor", "factor must be a number, not None."),
        ([1], "factor", "factor must be a number, not [1]."),
        (1.5, "count", "count must be a whole number, not 1.5."),
        (math.nan, "factor", "factor must be finite, not nan."),
        ("inf", "factor", "factor must be finite, not 'inf'."),
        ("maybe", "on", "on must be true or false, not 'maybe'."),
        ("tokn", "level", "level must be one of 'token', 'sequence', not 'tokn'."),
        ("sideways", "weighted", "weighted must be true or false or one of 'detached', not 'sideways'."),
        ("x", "old_style", "old_style must be a whole number or null, not 'x'."),
        (3, "label", "label must be a string, not 3."),
        (0, "factor", "factor (0.0) must be above 0."),
    ],
)
def test_values_of_another_type_or_range_are_refused_naming_component_and_key(
    given: object, key: str, message: str
) -> None:
    with pytest.raises(VariantError) as error:
        bound(**{key: given})
    assert str(error.value) == f"advantage_normalizer 'scaled': {message}"


def test_an_unknown_parameter_gets_the_nearest_name_or_all_of_them() -> None:
    with pytest.raises(VariantError) as error:
        bound(facto=1)
    assert str(error.value) == "advantage_normalizer 'scaled' has no parameter 'facto'. Did you mean 'factor'?"
    with pytest.raises(VariantError) as error:
        bound(zzz=1)
    assert str(error.value) == (
        "advantage_normalizer 'scaled' has no parameter 'zzz'. It has: factor, count, on, level, bound, weighted, "
        "old_style, label."
    )
    with pytest.raises(VariantError) as error:
        info_of(ppo_clip).bind("clip_rule", {"epsilon_hi": 0.3}, {})
    assert str(error.value) == "clip_rule 'ppo_clip' has no parameter 'epsilon_hi'. Did you mean 'epsilon_high'?"


def test_a_component_without_parameters_says_so() -> None:
    @component
    def plain(rewards: Tensor) -> Tensor:
        return rewards

    with pytest.raises(VariantError) as error:
        info_of(plain).bind("reward_shaper", {"x": 1}, {})
    assert str(error.value) == "reward_shaper 'plain' has no parameter 'x'. It has: nothing."


def test_a_check_that_only_says_no_still_names_the_component() -> None:
    @component(check=lambda p: p.low < p.high)
    def ranged(rewards: Tensor, *, low: float = 0.0, high: float = 1.0) -> Tensor:
        return rewards

    with pytest.raises(VariantError) as error:
        info_of(ranged).bind("reward_shaper", {"low": 2}, {})
    assert str(error.value) == "reward_shaper 'ranged': its parameters are out of range."


def test_a_slots_own_parameters_are_bound_beside_the_components() -> None:
    assert INFO.bind("regularizer", {"coef": "0.5"}, {"coef": 1.0})["coef"] == 0.5
    assert INFO.bind("regularizer", {}, {"coef": 1.0})["coef"] == 1.0


# -- signatures -------------------------------------------------------------------------------------------------------


def takes_anything(rewards: Tensor, **more: Any) -> Tensor:
    return rewards


def takes_many(*rewards: Tensor) -> Tensor:
    return rewards[0]


def no_default(rewards: Tensor, *, factor: float) -> Tensor:
    return rewards


def no_type(rewards: Tensor, *, factor=1.0) -> Tensor:
    return rewards


def not_after_a_star(rewards: Tensor, factor: float = 1.0) -> Tensor:
    return rewards


def unreadable(rewards: NoSuchType) -> Tensor:  # noqa: F821
    return rewards


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (takes_anything, "component 'takes_anything' takes *more; name its inputs and parameters one by one."),
        (takes_many, "component 'takes_many' takes *rewards; name its inputs and parameters one by one."),
        (no_default, "component 'no_default': parameter 'factor' needs a type and a default."),
        (no_type, "component 'no_type': parameter 'factor' needs a type and a default."),
        (
            not_after_a_star,
            "component 'not_after_a_star': 'factor' has a default, so it is a parameter; put it after a bare *.",
        ),
        (
            unreadable,
            "component 'unreadable': its annotations cannot be read (name 'NoSuchType' is not defined).",
        ),
    ],
)
def test_a_signature_that_is_no_components_is_refused(function: Callable, message: str) -> None:
    with pytest.raises(VariantError) as error:
        component(function)
    assert str(error.value) == message


def test_an_unknown_declaration_is_refused() -> None:
    with pytest.raises(VariantError) as error:
        component(group_centered=True)
    assert str(error.value) == (
        "@component has no argument 'group_centered'. Did you mean 'group_centred'? Arguments: name, paper, formula, "
        "check, min_generations, group_centred, batch_statistic, length_weighted, level, after_kl."
    )


def test_what_is_not_a_component_is_told_how_to_become_one() -> None:
    with pytest.raises(VariantError) as error:
        info_of(len)
    assert str(error.value) == "<built-in function len> is not a component. Put @component above its definition."


def test_the_words_of_messages() -> None:
    assert did_you_mean("epsilon_hi", ["epsilon_low", "epsilon_high"]) == " Did you mean 'epsilon_high'?"
    assert did_you_mean("zzz", ["epsilon_low"]) == ""
    assert listing(["a", "b"]) == "a, b"
    assert listing([]) == "nothing"


@component
def several(
    advantages: Tensor, *, weights: list[float] | None = None, by_name: dict[str, float] | None = None
) -> Tensor:
    """Multiply by some weights."""
    return advantages


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": [1.0, math.nan]}, "weights must be finite, not [1.0, nan]."),
        ({"by_name": {"a": math.inf}}, "by_name must be finite, not {'a': inf}."),
        ({"weights": [True]}, "weights must be list[float] or null, not [True]."),
    ],
)
def test_numbers_inside_lists_and_mappings_are_checked_as_those_outside(given: dict[str, Any], message: str) -> None:
    with pytest.raises(VariantError) as error:
        info_of(several).bind("advantage_normalizer", given, {})
    assert str(error.value) == f"advantage_normalizer 'several': {message}"
