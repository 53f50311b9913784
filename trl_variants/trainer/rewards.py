"""Rewards by the names of a config: what a name stands for, what it needs, and where it comes from.

A reward function has TRL's signature. One that needs a library says so in an attribute ``requires``, by module and
distribution (``{"math_verify": "math-verify"}``), so that a run without it ends before a model is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from trl_variants.errors import VariantError, did_you_mean, listing
from trl_variants.registry import Registry, load_registry
from trl_variants.trainer.trl_rewards import add_trl

__all__ = ["check_call", "check_libraries", "named_rewards", "origin", "origins", "written"]

#: What TRL's functions need beside TRL, as other functions say it in ``requires``.
_REQUIRED_BY_TRL = {name: {"math_verify": "math-verify"} for name in ("accuracy_reward", "reasoning_accuracy_reward")}
#: What TRL hands to a reward function besides the columns of the dataset, and which of those it keeps to itself.
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_KEPT = ("prompt", "completion", "completion_ids")

Reward = Callable[..., Any] | str


def named_rewards(names: Sequence[str], registry: Registry) -> list[Reward]:
    """What the names in ``reward_funcs`` stand for: registered functions, others by dotted path, models.

    Raises:
        VariantError: One stands for nothing.
    """
    return [_named(name, registry) for name in names]


def _named(name: str, registry: Registry) -> Reward:
    if name in registry.reward_functions:
        return registry.reward_function(name)
    if "/" in name or Path(name).is_dir():
        return name  # a model's id or folder
    module, _, attribute = name.rpartition(".")
    if not module:
        try:
            return registry.reward_function(name)
        except VariantError as error:
            raise VariantError(
                f"{error} A function of your own is written as a dotted path (my_module.my_reward), a model by its id "
                "or folder."
            ) from error.__cause__
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise VariantError(f"The reward function '{name}' cannot be imported: {error}") from error
    if not callable(function):
        raise VariantError(f"The reward function '{name}' is not callable.")
    return function  # type: ignore[no-any-return]


# -- what it needs --------------------------------------------------------------------------------------------------


def check_libraries(name: str, function: Reward) -> None:
    """Raise a `VariantError` where a reward function needs a library that is not installed."""
    for module, distribution in _required(function).items():
        if importlib.util.find_spec(module) is None:
            raise VariantError(f"reward function '{name}' needs {distribution}: pip install {distribution}.")


def check_call(name: str, function: Reward, columns: Iterable[str] | None) -> None:
    """Raise a `VariantError` where a function cannot be called with what TRL and a dataset's columns give it."""
    if isinstance(function, str) or columns is None:
        return
    columns = [column for column in columns if column not in _KEPT]
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C says nothing of its arguments
        return
    try:
        signature.bind(**dict.fromkeys([*_GIVEN, *columns]))
    except TypeError as error:
        needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        missing = [word for word in needed if word not in (*_GIVEN, *columns) and f"'{word}'" in str(error)]
        hint = did_you_mean(missing[0], columns) if missing else ""
        raise VariantError(
            f"reward function '{name}' cannot be called: {error}.{hint} TRL gives it {listing(_GIVEN)}, and the "
            f"dataset's other columns: {listing(columns)}."
        ) from error


def _required(function: Any) -> dict[str, str]:
    code = _code(function)
    by_trl = str(getattr(code, "__module__", "")).startswith("trl.")
    said: dict[str, str] | None = getattr(function, "requires", None) or getattr(code, "requires", None)
    return said or (_REQUIRED_BY_TRL.get(code.__name__, {}) if by_trl and inspect.isfunction(code) else {})


# -- where it comes from --------------------------------------------------------------------------------------------


def origins(trainer: Any) -> list[dict[str, Any]]:
    """What rewards in a run, and where each comes from: a function as `origin` says, a model by its path."""
    registry = add_trl(load_registry(extra=trainer.args.variant_plugins or ()))
    return [
        {"name": name, "model": getattr(getattr(function, "config", None), "_name_or_path", None)}
        if isinstance(function, nn.Module)
        else {"name": name, **origin(function.__wrapped__, registry)}  # of `checked_reward`
        for name, function in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)
    ]


def origin(function: Any, registry: Registry) -> dict[str, Any]:
    """Where a reward function comes from, as plain data.

    Args:
        function: The function.
        registry: Where it may be registered; else it is of the distribution that its module came with, if any.

    Returns:
        ``function`` (its module and name), ``distribution`` and ``version`` (None where there is none), and the
        versions of the ``packages`` that it needs.
    """
    code = _code(function)
    module = str(getattr(code, "__module__", None) or type(code).__module__)
    known = registry.reward_functions.items()
    owner = next((registry.owner("reward_function", name) for name, own in known if own is function), None)
    distribution = owner.distribution if owner else _distribution(module)
    return {
        "function": f"{module}.{getattr(code, '__qualname__', type(code).__qualname__)}",
        "distribution": distribution,
        "version": (owner.version or None) if owner else distribution and _version(distribution),
        "packages": {package: _version(package) for package in _required(function).values()},
    }


def written(name: str, function: Reward, registry: Registry) -> str:
    """A reward as a config names it, and where it comes from: ``accuracy_reward (trl 1.16.0, math-verify 0.9.0)``."""
    if isinstance(function, str):
        return name
    found = origin(function, registry)
    said = [f"{found['distribution']} {found['version'] or ''}".strip()] if found["distribution"] else []
    said += [f"{package} {version or 'not installed'}" for package, version in found["packages"].items()]
    return f"{name} ({', '.join(said)})" if said else name


def _code(function: Any) -> Any:
    """The function itself under a `partial`."""
    return _code(function.func) if isinstance(function, partial) else function


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _distribution(module: str) -> str | None:
    found = _distributions().get(module.partition(".")[0])
    return found[0] if found else None


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())
