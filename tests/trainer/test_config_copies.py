"""Overrides in every form that they may be written in; copies, logs and pickles of a config."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, TrlParser

from tests import tiny
from trl_variants import KL, Variant, VariantConfig, VariantError, VariantTrainer, component, use
from trl_variants.components.clip_rules import cispo

OWNED = [f.name for f in VariantConfig._owned_fields()]


def refused(folder: Any, *args: Any, **settings: Any) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(VariantError) as caught:
        tiny.config(folder, *args, **settings)
    return str(caught.value)


# -- overrides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"clip_rule": {"epsilon_high": 3e-1}, "kl": "none"}',  # JSON
        "{clip_rule: {epsilon_high: 0.3}, kl: none}",  # YAML, flow
        '{clip_rule: {epsilon_high: 0.3}, kl: "none"}',  # YAML with quotes, which is no JSON
        "clip_rule:\n  epsilon_high: 3e-1\nkl: null",  # YAML, block; 3e-1 is a string in YAML 1.1
    ],
)
def test_overrides_may_be_written_as_json_or_yaml(text: str, tmp_path: Any) -> None:
    recipe = tiny.config(tmp_path, "grpo", variant_overrides=text).recipe
    assert recipe.kl is None
    assert dict(recipe.clip_rule.parameters) == {"epsilon_low": 0.2, "epsilon_high": 0.3}


@pytest.mark.parametrize("text", ["dapo", "[1, 2]", "", "3"])
def test_overrides_that_are_no_mapping_are_refused(text: str, tmp_path: Any) -> None:
    assert refused(tmp_path, variant_overrides=text) == f"variant_overrides must be a mapping by slot, not {text!r}."


def test_overrides_that_cannot_be_read_are_refused(tmp_path: Any) -> None:
    assert refused(tmp_path, variant_overrides='{"kl": ').startswith("variant_overrides is neither JSON nor YAML: ")


def test_a_misspelt_override_is_refused_when_the_config_is_made(tmp_path: Any) -> None:
    assert "has no parameter 'epsilon_hi'. Did you mean 'epsilon_high'?" in refused(
        tmp_path, variant_overrides={"clip_rule": {"epsilon_hi": 0.3}}
    )
    assert "No variant named 'grp0'. Did you mean 'grpo'?" in refused(tmp_path, "grp0")


def test_the_command_line_takes_overrides_and_a_yaml_file_too(tmp_path: Any) -> None:
    (parser,) = (TrlParser(VariantConfig),)
    common = ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none", "--variant", "dapo"]
    (args,) = parser.parse_args_and_config([*common, "--variant_overrides", '{"clip_rule": {"epsilon_low": 0.1}}'])
    assert args.recipe.clip_rule.parameters["epsilon_low"] == 0.1
    (tmp_path / "c.yaml").write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\nreport_to: none\nvariant: gspo\n"
        "variant_overrides:\n  clip_rule:\n    epsilon_high: 5e-4\n"
    )
    (args,) = parser.parse_args_and_config(["--config", str(tmp_path / "c.yaml")])
    assert args.recipe.clip_rule.parameters["epsilon_high"] == 5e-4
    with pytest.raises(VariantError, match="epsilon is set in the config, but the variant decides it"):
        parser.parse_args_and_config([*common, "--epsilon", "0.3"])


@component
def halved(rewards: Any, *, factor: float = 0.5) -> Any:
    """Half the reward."""
    return factor * rewards


MINE = Variant(name="mine", extends="grpo", advantage_estimator=use(halved, factor=0.25), advantage_normalizer="none")


def test_a_variant_and_components_may_be_the_objects_themselves(tmp_path: Any) -> None:
    args = tiny.config(tmp_path, MINE)
    assert args.recipe.variant.name == "mine"
    assert dict(args.recipe.advantage_estimator.parameters) == {"factor": 0.25}
    overridden = tiny.config(
        tmp_path, "grpo", variant_overrides={"clip_rule": cispo, "kl": KL("k2", placement="loss", coef=0.1)}
    )
    assert overridden.recipe.clip_rule.name == "cispo" and overridden.recipe.kl.coef == 0.1


# -- copies and logs -----------------------------------------------------------------------------------------------


OBJECTS = {"clip_rule": use(cispo, epsilon_max=4.0), "kl": KL("k2", placement="loss", coef=0.1)}
CONFIGS = {
    "names": ("dapo", {"clip_rule": {"epsilon_high": 0.3}}),
    "objects": (MINE, OBJECTS),
}


@pytest.fixture(params=CONFIGS)
def args(request: Any, tmp_path: Any) -> VariantConfig:
    variant, overrides = CONFIGS[request.param]
    return tiny.config(tmp_path, variant, variant_overrides=overrides)


def test_what_is_logged_is_json_and_shows_no_value_that_is_not_used(args: VariantConfig) -> None:
    logged = json.loads(args.to_json_string())
    assert {logged[name] for name in OWNED} == {None}
    assert logged["variant"] == args.recipe.variant.name
    assert logged["num_generations"] == 4
    assert args.recipe.variant.name in str(args) and args.recipe.variant.name in repr(args)
    args.to_sanitized_dict()


def test_a_printed_config_hides_tokens(tmp_path: Any) -> None:
    assert "secret" not in str(tiny.config(tmp_path, hub_token="secret"))


def test_objects_are_logged_by_what_they_are(tmp_path: Any) -> None:
    logged = tiny.config(tmp_path, MINE, variant_overrides=OBJECTS).to_dict()
    assert logged["variant_overrides"] == {
        "clip_rule": {"name": "trl_variants.components.clip_rules.cispo", "epsilon_max": 4.0},
        "kl": {"estimator": "k2", "placement": "loss", "coef": 0.1, "weighted": False, "controller": "fixed"},
    }


def test_a_deep_copy_has_the_same_recipe_and_its_own_settings(args: VariantConfig) -> None:
    twin = copy.deepcopy(args)
    assert twin.recipe is args.recipe
    twin.logging_steps = 77
    twin.accelerator_config.even_batches = not args.accelerator_config.even_batches
    assert args.logging_steps == 1
    assert args.accelerator_config.even_batches != twin.accelerator_config.even_batches


def test_pickling_keeps_the_settings_and_resolves_registered_names_again(tmp_path: Any) -> None:
    args = tiny.config(tmp_path, "dapo", variant_overrides={"clip_rule": {"epsilon_high": 0.3}})
    back = pickle.loads(pickle.dumps(args))
    assert back.to_dict() == args.to_dict()
    assert back.recipe.clip_rule.parameters["epsilon_high"] == 0.3


def test_pickling_works_for_objects_which_it_keeps_by_name(tmp_path: Any) -> None:
    args = tiny.config(tmp_path, MINE, variant_overrides=OBJECTS)
    back = pickle.loads(pickle.dumps(args))
    assert back.variant == "mine"
    with pytest.raises(VariantError, match="No variant named 'mine'"):
        _ = back.recipe


def test_a_config_can_be_made_again_from_its_dict(tmp_path: Any) -> None:
    args = tiny.config(tmp_path, "dapo", variant_overrides={"clip_rule": {"epsilon_high": 0.3}})
    # TRL refuses the batch size of a rollout beside the steps that it follows from.
    again = VariantConfig(**{k: v for k, v in args.to_dict().items() if k != "generation_batch_size"})
    assert again.to_dict() == args.to_dict()
    assert again.recipe.clip_rule == args.recipe.clip_rule


# -- the trainer's argument ----------------------------------------------------------------------------------------


def test_the_trainer_takes_no_plain_config_of_trl(tmp_path: Any) -> None:
    plain = GRPOConfig(output_dir=str(tmp_path), **{**tiny.SETTINGS, "num_generations": 4})
    for args, kind in ((plain, "a GRPOConfig"), ({}, "dict")):
        with pytest.raises(VariantError) as caught:
            VariantTrainer(model=tiny.model(), reward_funcs=tiny.low_words, args=args, train_dataset=tiny.dataset())
        assert str(caught.value) == (
            f"args must be a VariantConfig, not {kind}. Write VariantConfig(variant=..., ...)."
        )


def test_without_a_config_it_is_grpo(tmp_path: Any, path: str, monkeypatch: Any) -> None:
    class Small(VariantConfig):
        """The default, for a machine without a GPU."""

        def __init__(self, output_dir: str) -> None:
            super().__init__(output_dir=str(tmp_path / output_dir), **{**tiny.SETTINGS, "num_generations": 4})

    monkeypatch.setattr("trl_variants.trainer.trainer.VariantConfig", Small)
    trainer = VariantTrainer(
        model=path, reward_funcs=tiny.low_words, train_dataset=tiny.dataset(), processing_class=tiny.tokenizer()
    )
    assert trainer.recipe.variant.name == "grpo"
    assert trainer.args.output_dir == str(tmp_path / f"{Path(path).name}-GRPO")


PLUGIN = '''
from trl_variants import Variant, component, hookimpl, use


@component
def centred(rewards, *, scale: float = 1.0):
    """Rewards against their mean."""
    return scale * (rewards - rewards.mean())


@hookimpl
def register_advantage_estimators():
    return [centred]


@hookimpl
def register_variants():
    return [Variant(name="centred_dapo", extends="dapo", advantage_estimator=use("centred", scale=2.0))]
'''


def test_a_variant_of_ones_own_in_one_file_is_named_in_the_config_and_trains(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    args = tiny.config(tmp_path, "centred_dapo", variant_plugins=[str(tmp_path / "mine.py")], max_steps=1)
    trainer = VariantTrainer(
        model=tiny.model(),
        reward_funcs=tiny.low_words,
        args=args,
        train_dataset=tiny.dataset(),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    assert trainer.recipe.advantage_estimator.parameters == {"scale": 2.0}
    assert json.loads((tmp_path / "variant.json").read_text())["variant"] == "centred_dapo"
    assert pickle.loads(pickle.dumps(args)).recipe.variant.name == "centred_dapo"
