"""From a YAML file and a command line to a trained model, with TRL's own arguments and parser."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from trl_variants.errors import VariantError, did_you_mean, listing
from trl_variants.overrides import OVERRIDES
from trl_variants.rebuilding import settings_of_run
from trl_variants.registry import load_registry
from trl_variants.trainer.config import VariantConfig
from trl_variants.trainer.rewards import check_call, check_libraries, named_rewards
from trl_variants.trainer.trl_rewards import add_trl

__all__ = ["Job", "parse", "run"]


@dataclass(frozen=True)
class Job:
    """Everything that a run is started with, checked as far as it can be without loading a model or a dataset."""

    script: GRPOScriptArguments
    training: VariantConfig
    model: ModelConfig
    data: DatasetMixtureConfig
    reward_names: list[str]
    reward_funcs: list[Callable[..., Any] | str]
    settings: dict[str, Any]


def parse(arguments: Sequence[str], *, anywhere: bool = False, plugins: Sequence[str] = ()) -> Job:
    """Parse ``--config FILE.yaml`` and further options, which win over the file.

    Args:
        arguments: The command line.
        anywhere: Whether a machine without an accelerator, and without the libraries of rewards, is good enough, as it
            is for checking.
        plugins: Modules and files to load besides the ``variant_plugins`` of file and line.

    Raises:
        VariantError: A key is unknown or has a wrong value, or something that is named does not exist.
    """
    arguments = list(arguments)
    parser = TrlParser(
        (GRPOScriptArguments, VariantConfig, ModelConfig, DatasetMixtureConfig),
        prog="trl-variants train",
        allow_abbrev=False,  # what is misspelt is no other option
    )
    if anywhere and not torch.accelerator.is_available():
        parser.set_defaults(use_cpu=True)  # before the file, which may say otherwise
    settings: dict[str, Any] = {}
    if "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise VariantError("--config needs the name of a YAML file.")
        settings = _apply_file(parser, Path(arguments[at + 1]))
        del arguments[at : at + 2]
    if plugins:
        arguments = _with_plugins(parser, arguments, plugins)
    script, training, model, data = _parse_line(parser, arguments)
    settings |= _given(parser, arguments)
    names = [*filter(None, [script.reward_model_name_or_path]), *(script.reward_funcs or ())]
    job = Job(script, training, model, data, names, _rewards(names, training), settings)
    _check_places(job)
    if not anywhere:
        for name, function in zip(names, job.reward_funcs, strict=True):
            check_libraries(name, function)
    return job


def _with_plugins(parser: TrlParser, arguments: list[str], plugins: Sequence[str]) -> list[str]:
    """The line with further plugins, beside those that it or else the file names."""
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only.add_argument(
        "--variant_plugins", "--variant-plugins", nargs="+", default=parser.get_default("variant_plugins")
    )
    found, rest = only.parse_known_args(arguments)
    return [*rest, "--variant_plugins", *dict.fromkeys([*(found.variant_plugins or ()), *plugins])]


def run(job: Job) -> Any:
    """Load the dataset, train, save; return the trainer."""
    from datasets import load_dataset
    from trl import get_dataset, get_peft_config, get_quantization_config

    from trl_variants.trainer.trainer import VariantTrainer

    script, training = job.script, job.training
    training.model_init_kwargs = {
        "revision": job.model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": job.model.attn_implementation,
        "dtype": job.model.dtype,
        **(training.model_init_kwargs or {}),
    }
    with _named("the dataset"):
        if job.data.datasets:
            dataset = get_dataset(job.data)
        else:
            dataset = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    evaluated = training.eval_strategy != "no"
    for split in (script.dataset_train_split, *([script.dataset_test_split] if evaluated else [])):
        if split not in dataset:
            raise VariantError(
                f"The dataset has no split '{split}'.{did_you_mean(split, dataset)} It has: {listing(dataset)}."
            )
        for name, function in zip(job.reward_names, job.reward_funcs, strict=True):
            check_call(name, function, dataset[split].column_names)
    with _named(f"the model {job.model.model_name_or_path} or a reward model"):
        trainer = VariantTrainer(
            model=job.model.model_name_or_path,
            reward_funcs=job.reward_funcs,
            args=training,
            train_dataset=dataset[script.dataset_train_split],
            eval_dataset=dataset[script.dataset_test_split] if evaluated else None,
            quantization_config=get_quantization_config(job.model),
            peft_config=get_peft_config(job.model),
        )
    trainer.run_settings = job.settings
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    trainer.accelerator.print(f"Model saved to {training.output_dir}")
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.end()
    return trainer


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say what could not be loaded, where a library says only that it reached no file and no hub."""
    try:
        yield
    except OSError as error:
        raise VariantError(f"Could not load {what}: {str(error).strip().splitlines()[0]}") from error


# -- the file -------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML with the numbers of YAML 1.2 (``1e-6`` is one, which YAML 1.1 reads as a string), and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for (key_node, _), key in zip(node.value, keys, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' is set twice", key_node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$"),
    list("-+0123456789."),
)


def _read(path: Path) -> dict[str, Any]:
    """The settings of a YAML file, or of the run that a ``variant.json`` tells of."""
    if not path.is_file():
        raise VariantError(f"There is no config file {path}.")
    if path.suffix == ".json":
        return settings_of_run(path)
    try:
        with path.open(encoding="utf-8") as file:  # whose name YAML's messages then show
            values = yaml.load(file, Loader=_Loader)
    except yaml.YAMLError as error:
        raise VariantError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise VariantError(f"{path} must hold a mapping of settings.")
    return values


def _apply_file(parser: TrlParser, path: Path) -> dict[str, Any]:
    """Make the values of a file the parser's defaults; the settings that it holds."""
    values = _read(path)
    settings = dict(values)
    environment = values.pop("env", None) or {}
    if not isinstance(environment, dict):
        raise VariantError(f"{path}: env must be a mapping.")
    os.environ.update({name: str(value) for name, value in environment.items()})
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    for key, value in values.items():
        if key not in actions:
            hint = (
                f" Put it under variant_overrides: {{{key}: ...}}." if key in OVERRIDES else did_you_mean(key, actions)
            )
            raise VariantError(f"{path} has an unknown key '{key}'.{hint}")
        values[key] = _as_on_the_line(actions[key], value)
    parser.set_defaults_with_config(**values)
    return settings


def _given(parser: TrlParser, arguments: list[str]) -> dict[str, Any]:
    """The settings that the line itself holds."""
    absent = object()
    blank = argparse.Namespace(**{action.dest: absent for action in parser._actions})
    # Argparse leaves alone what the namespace has, so only what the line holds, abbreviated or not, is written over.
    values = vars(parser.parse_known_args(arguments, blank)[0])
    return {name: value for name, value in values.items() if value is not absent}


def _as_on_the_line(action: argparse.Action, value: Any) -> Any:
    """A scalar as text, so that the parser converts and checks it as it does on the command line."""
    if value is None or isinstance(value, (dict, list)):
        return value
    if action.nargs in ("+", "*"):  # one name where a list is due is a list of one
        return [value]
    if isinstance(value, bool) and action.type is str:
        return value
    return str(value)


def _parse_line(parser: TrlParser, arguments: list[str]) -> tuple[Any, ...]:
    """Parse; what argparse would print before it exits becomes an error."""
    said = StringIO()
    try:
        with redirect_stderr(said):
            *parsed, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise VariantError(said.getvalue().strip().rpartition("error: ")[2] or "The arguments are not valid.") from stop
    except VariantError:
        raise
    except ValueError as error:  # a check of TRL's or transformers' own
        raise VariantError(str(error)) from error
    for word in unknown:
        if word.startswith("--"):
            name = word.lstrip("-").partition("=")[0]
            raise VariantError(f"There is no option '--{name}'.{did_you_mean(name, _options(parser))}")
    if unknown:
        raise VariantError(f"Unexpected argument '{unknown[0]}'.")
    return tuple(parsed)


def _options(parser: TrlParser) -> Iterable[str]:
    return (option.lstrip("-") for action in parser._actions for option in action.option_strings)


# -- what is named --------------------------------------------------------------------------------------------------


def _rewards(names: Sequence[str], training: VariantConfig) -> list[Callable[..., Any] | str]:
    """Rewards by registered name, TRL's name, dotted path or model id."""
    registry = add_trl(load_registry(extra=training.variant_plugins or ()))
    if not names:
        raise VariantError(
            "No reward: set reward_funcs to names or dotted paths, or reward_model_name_or_path to a model. "
            f"Names: {listing(sorted(registry.reward_functions))}."
        )
    return named_rewards(names, registry)


def _check_places(job: Job) -> None:
    """Check that the model and the dataset are named, and exist where they are local."""
    if not job.model.model_name_or_path:
        raise VariantError("No model: set model_name_or_path.")
    if bool(job.data.datasets) == bool(job.script.dataset_name):
        both = "Both dataset_name and datasets are set; keep one."
        raise VariantError(both if job.data.datasets else "No dataset: set dataset_name or datasets.")
    places = {"model_name_or_path": job.model.model_name_or_path, "dataset_name": job.script.dataset_name}
    for key, place in places.items():
        if place and place.startswith((".", "/", "~")) and not Path(place).expanduser().exists():
            raise VariantError(f"{key}: there is no folder {place}.")
