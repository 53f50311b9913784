"""Rewards by name: TRL's own, those of plugins, of one's own; what they need, and where each comes from."""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from trl import rewards as trl_rewards

from tests import tiny
from tests.trainer import runs
from trl_variants import VariantError, hookimpl, load_registry
from trl_variants.registry import Owner, Registry
from trl_variants.testing import train_config
from trl_variants.trainer.launch import parse
from trl_variants.trainer.rewards import check_call, check_libraries, named_rewards, origin, written
from trl_variants.trainer.trl_rewards import add_trl

ROOT = Path(__file__).parents[2]
TRL = f"trl {metadata.version('trl')}"


def at_most(completion_ids: list[list[int]], *, limit: int, **_: Any) -> list[float]:
    """1 for a completion of at most so many tokens."""
    return [float(len(ids) <= limit) for ids in completion_ids]


class Judge:
    """A reward function that is an object with a parameter, and needs a library."""

    requires = {"no_such_library": "no-such-library"}

    def __init__(self, name: str, bonus: float) -> None:
        self.__name__, self.bonus = name, bonus

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [self.bonus] * len(completions)


def short(limit: int, name: str) -> Any:
    made = functools.partial(at_most, limit=limit)
    made.__name__ = name  # type: ignore[attr-defined]
    return made


def registry_with(*functions: Any) -> Registry:
    class Plugin:
        @hookimpl
        def register_reward_functions(self) -> list[Any]:
            return list(functions)

    registry = load_registry("none")
    registry.add(Plugin(), Owner("mine", "mine", "1.0"))
    return add_trl(registry)


# -- names ----------------------------------------------------------------------------------------------------------


def test_names_are_trls_functions_registered_ones_dotted_paths_and_models() -> None:
    judge, tight = Judge("judge", 0.5), short(2, "tight")
    registry = registry_with(judge, tight)
    names = ["accuracy_reward", "judge", "tight", "tests.tiny.low_words", "some/model"]
    found = named_rewards(names, registry)
    assert found == [trl_rewards.accuracy_reward, judge, tight, tiny.low_words, "some/model"]
    assert found[1](["a", "b"]) == [0.5, 0.5] and found[2](completion_ids=[[1], [1, 2, 3]]) == [1.0, 0.0]


def test_a_name_that_a_plugin_shares_with_trl_names_both_and_its_dotted_path_decides() -> None:
    registry = registry_with(Judge("accuracy_reward", 1.0))
    with pytest.raises(VariantError) as error:
        named_rewards(["accuracy_reward"], registry)
    assert str(error.value) == f"reward_function 'accuracy_reward' is registered by both mine 1.0 and {TRL}."
    assert named_rewards(["trl.rewards.accuracy_reward"], registry) == [trl_rewards.accuracy_reward]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("acuracy_reward", f"Did you mean 'accuracy_reward'? Registered: accuracy_reward ({TRL}), judge (mine 1.0), "),
        ("reasoning_gim", "Did you mean 'reasoning_gym'? It is in the plugin trl-variants-rewards"),
        ("math_verify", "'math_verify' is in the plugin trl-variants-rewards"),
        ("zzz", "Registered: accuracy_reward"),
    ],
)
def test_a_name_that_stands_for_nothing_says_the_nearest_and_whose_all_are(name: str, said: str) -> None:
    with pytest.raises(VariantError) as error:
        named_rewards([name], registry_with(Judge("judge", 1.0)))
    start = f"No reward function named '{name}'. {said}"
    assert str(error.value).startswith(start)
    assert str(error.value).endswith(
        "A function of your own is written as a dotted path (my_module.my_reward), a model by its id or folder."
    )


def test_a_function_without_a_name_is_refused() -> None:
    for nameless in (functools.partial(at_most, limit=1), lambda **_: []):
        with pytest.raises(VariantError, match="has no name for a config. Set its __name__"):
            registry_with(nameless)


# -- needs ----------------------------------------------------------------------------------------------------------


def test_a_library_is_asked_of_whose_function_it_is_and_not_of_its_name() -> None:
    with pytest.raises(VariantError) as error:
        check_libraries("judge", Judge("judge", 1.0))
    assert str(error.value) == "reward function 'judge' needs no-such-library: pip install no-such-library."
    with pytest.raises(VariantError, match="no-such-library"):
        check_libraries("partly", functools.partial(Judge("judge", 1.0), a=1))
    check_libraries("some/model", "some/model")

    def accuracy_reward(**_: Any) -> list[float]:
        return []

    assert origin(accuracy_reward, registry_with())["packages"] == {}
    assert list(origin(trl_rewards.accuracy_reward, registry_with())["packages"]) == ["math-verify"]


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (trl_rewards.accuracy_reward, ["prompt", "solution"], None),
        (
            trl_rewards.accuracy_reward,
            ["prompt", "solutions"],
            "reward function 'r' cannot be called: missing a required argument: 'solution'. Did you mean 'solutions'? "
            "TRL gives it prompts, completions, completion_ids, trainer_state, log_extra, log_metric, and the "
            "dataset's other columns: solutions.",
        ),
        (trl_rewards.accuracy_reward, None, None),  # of a stream, whose columns nobody knows yet
        (lambda completions: [], ["prompt"], "cannot be called: got an unexpected keyword argument 'prompts'"),
        (lambda prompt, **_: [], ["prompt"], "missing a required argument: 'prompt'"),
        (functools.partial(at_most, limit=1), ["prompt", "x"], None),
        (at_most, ["prompt", "limit"], None),
        (at_most, ["prompt"], "missing a required argument: 'limit'"),
        (Judge("judge", 1.0), ["prompt"], None),
        (max, ["prompt"], None),  # which only a call can tell
        ("some/model", ["prompt"], None),
    ],
)
def test_a_call_that_cannot_be_is_told_beforehand(function: Any, columns: Any, message: str | None) -> None:
    if message is None:
        check_call("r", function, columns)
        return
    with pytest.raises(VariantError) as error:
        check_call("r", function, columns)
    assert message in str(error.value)


def test_a_column_that_is_missing_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(VariantError, match="'accuracy_reward' cannot be called: missing a required argument"):
        train_config(
            ROOT / "configs" / "grpo.yaml",
            tmp_path,
            reward_funcs=["accuracy_reward"],
            model_name_or_path=str(tmp_path),  # which holds no model
        )


# -- origins --------------------------------------------------------------------------------------------------------


def test_where_a_reward_comes_from() -> None:
    judge, tight = Judge("judge", 0.5), short(2, "tight")
    registry = registry_with(judge, tight)
    here = {"distribution": "mine", "version": "1.0"}
    assert origin(judge, registry) == {
        "function": f"{__name__}.Judge",
        **here,
        "packages": {"no-such-library": None},
    }
    assert origin(tight, registry) == {"function": f"{__name__}.at_most", **here, "packages": {}}
    unknown = {"distribution": None, "version": None, "packages": {}}
    assert origin(at_most, registry) == {"function": f"{__name__}.at_most", **unknown}
    assert origin(json.dumps, registry) == {"function": "json.dumps", **unknown}
    assert written("judge", judge, registry) == "judge (mine 1.0, no-such-library not installed)"
    assert written("accuracy_reward", trl_rewards.accuracy_reward, registry) == (
        f"accuracy_reward ({TRL}, math-verify {metadata.version('math-verify')})"
    )
    # One that is not registered is of the distribution that its module came with.
    made = trl_rewards.get_repetition_penalty_reward()
    assert written("made", made, registry) == f"made ({TRL})"
    assert written("tests.tiny.low_words", tiny.low_words, registry) == "tests.tiny.low_words"
    assert written("some/model", "some/model", registry) == "some/model"


def test_a_run_says_where_its_rewards_come_from_and_logs_each_by_its_own_name(tmp_path: Path) -> None:
    rewards = [short(2, "tight"), short(4, "loose"), trl_rewards.get_repetition_penalty_reward(), tiny.low_words]
    trainer = runs.trained(tmp_path, "grpo", rewards=rewards, max_steps=1)
    said = json.loads((Path(trainer.args.output_dir) / "variant.json").read_text())["rewards"]
    assert [(entry["name"], entry["function"]) for entry in said] == [
        ("tight", f"{__name__}.at_most"),
        ("loose", f"{__name__}.at_most"),
        ("repetition_penalty_reward", "trl.rewards.other_rewards._RepetitionPenalty"),
        ("low_words", "tests.tiny.low_words"),
    ]
    assert [entry["version"] for entry in said] == [None, None, metadata.version("trl"), None]
    # A completion within the tighter limit is within the other; both are in the log.
    assert trainer.logs[0]["rewards/tight/mean"] <= trainer.logs[0]["rewards/loose/mean"]


# -- plugins of the command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling", [["--variant_plugins", "{}"], ["--variant-plugins", "{}"], ["--variant_plugins={}"]]
)
def test_plugins_stand_beside_those_of_the_line_however_it_spells_them(spelling: list[str], tmp_path: Path) -> None:
    source = "from trl_variants import hookimpl\ndef {0}(**_):\n    return []\n@hookimpl\n"
    source += "def register_reward_functions():\n    return [{0}]\n"
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.py").write_text(source.format(name))
    one, two, three = (str(tmp_path / f"{name}.py") for name in ("one", "two", "three"))
    (tmp_path / "c.yaml").write_text(
        f"model_name_or_path: m\ndataset_name: d\nvariant_plugins: {three}\nreward_funcs: [one, two]\n"
    )
    line = ["--config", str(tmp_path / "c.yaml"), *(word.format(one) for word in spelling), "--max_steps", "1"]
    job = parse(line, anywhere=True, plugins=[two, one])
    assert job.training.variant_plugins == job.settings["variant_plugins"] == [one, two]
    assert job.training.max_steps == 1 and job.reward_names == ["one", "two"]
    job = parse([*line[:2], "--reward_funcs", "two", "three"], anywhere=True, plugins=[two])
    assert job.training.variant_plugins == [three, two]
