"""Another TRL than the one this package was written for is told by name, before anything runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import trl

import trl_variants.trainer
from trl_variants import VariantError, VariantTrainer
from trl_variants.trainer import compat
from trl_variants.trainer.compat import ATTRIBUTES, CONSTRUCTOR, FUNCTIONS, METHODS, VISION_INPUTS, check_trl

ROOT = Path(trl_variants.trainer.__file__).parent


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(VariantError) as caught:
        check_trl(*args, **kwargs)
    return str(caught.value)


AFTER = " trl-variants builds on it; install the trl version that it was released for."


def test_the_installed_version_is_the_right_one() -> None:
    check_trl()
    check_trl(trl.GRPOTrainer, "1.16.3")
    check_trl(trl.GRPOTrainer, "1.16.3.dev0")


@pytest.mark.parametrize("installed", ["1.15.9", "1.17.0", "2.0", "1.17.0.dev0+abc", "1.16.0rc1"])
def test_another_version_is_refused_with_what_to_run(installed: str) -> None:
    assert message(installed=installed) == (
        f"trl {installed} is installed; trl-variants works with trl >= 1.16, < 1.17. Run: pip install 'trl>=1.16,<1.17'"
    )


def changed(**members: Any) -> type:
    """GRPOTrainer with some members replaced."""
    return type("GRPOTrainer", (trl.GRPOTrainer,), members)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_gone_is_named(name: str) -> None:
    assert message(changed(**{name: None}), "1.16.0") == f"trl 1.16.0: GRPOTrainer.{name} is gone.{AFTER}"


def test_a_method_with_other_parameters_is_named_with_both(monkeypatch: Any) -> None:
    # pains G13: one more parameter in front, and one renamed.
    def moved(self: Any, model: Any, extra: Any, inputs: Any) -> None: ...

    def renamed(self: Any, batch: Any) -> None: ...

    assert message(changed(_compute_loss=moved), "1.16.0") == (
        "trl 1.16.0: GRPOTrainer._compute_loss takes ('self', 'model', 'extra', 'inputs'), "
        f"expected ('self', 'model', 'inputs') first.{AFTER}"
    )
    assert message(changed(_prepare_inputs=renamed), "1.16.0") == (
        "trl 1.16.0: GRPOTrainer._prepare_inputs takes ('self', 'batch'), "
        f"expected ('self', 'generation_batch') first.{AFTER}"
    )


def test_a_further_parameter_at_the_end_is_no_reason_to_refuse() -> None:
    def longer(self: Any, model: Any, inputs: Any, new: Any = None) -> None: ...

    check_trl(changed(_compute_loss=longer), "1.16.0")


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in FUNCTIONS.items() for name in names])
def test_a_function_that_is_gone_or_changed_is_named(module: str, name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(f"{module}.{name}", lambda other: None)
    assert message(installed="1.16.0") == (
        f"trl 1.16.0: {module}.{name} takes ('other',), expected {FUNCTIONS[module][name]} first.{AFTER}"
    )
    monkeypatch.delattr(f"{module}.{name}")
    assert message(installed="1.16.0") == f"trl 1.16.0: {module}.{name} is gone.{AFTER}"


def test_another_constructor_is_refused_with_both() -> None:
    def shorter(self: Any, model: Any, args: Any) -> None: ...

    assert message(changed(__init__=shorter), "1.16.0") == (
        f"trl 1.16.0: GRPOTrainer's constructor takes ('model', 'args'), expected {CONSTRUCTOR}.{AFTER}"
    )


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_is_no_longer_set_is_named(name: str, monkeypatch: Any) -> None:
    source = inspect.getsource(trl.GRPOTrainer.__init__)
    assert f"self.{name} =" in source
    monkeypatch.setattr(compat.inspect, "getsource", lambda _: source.replace(f"self.{name} =", "self.other ="))
    assert message(installed="1.16.0") == f"trl 1.16.0: GRPOTrainer no longer sets self.{name}.{AFTER}"


def test_our_constructor_is_trls() -> None:
    assert tuple(inspect.signature(VariantTrainer.__init__).parameters)[1:] == (*CONSTRUCTOR, "critic_model")


def test_multimodal_inputs_are_those_of_the_scoring_pass() -> None:
    assert "pixel_values" in VISION_INPUTS and not {"model", "input_ids", "compute_entropy"} & set(VISION_INPUTS)


# -- nothing private is used unlisted ------------------------------------------------------------------------------


def test_every_private_import_from_trl_is_on_the_list() -> None:
    public = {"trl"}
    for path in ROOT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
                if node.module in public or node.module == "trl.scripts.grpo":
                    continue
                if (node.module, [alias.name for alias in node.names]) == ("trl.trainer", ["grpo_trainer"]):
                    used = set(re.findall(r"grpo_trainer\.(\w+)\(", path.read_text()))
                    assert used and used <= set(FUNCTIONS["trl.trainer.grpo_trainer"]), path.name
                    continue
                assert {alias.name for alias in node.names} <= set(FUNCTIONS[node.module]), path.name


def test_every_private_method_that_is_overridden_or_called_is_on_the_list() -> None:
    ours = {name for name in vars(VariantTrainer) if callable(getattr(VariantTrainer, name))}
    overridden = {name for name in ours if name.startswith("_") and hasattr(trl.GRPOTrainer, name)}
    called = {"_set_signature_columns_if_needed", "_generate"}  # by the stream of prompts, by the greedy pass
    listed = {name for name in METHODS if name.startswith("_")}
    assert (overridden | called) - {"__init__", "__doc__", "__module__"} == listed


@pytest.mark.parametrize("module", ["trainer", "config", "reference", "scoring"])
def test_a_wrong_version_is_told_before_any_import_can_fail(module: str, monkeypatch: Any) -> None:
    # What a user of another TRL sees: our sentence, and not the first of its private names that has moved.
    for name in [name for name in sys.modules if name.startswith("trl_variants.trainer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.15.0")
    monkeypatch.delattr("trl.trainer.utils.add_fused_lm_head")
    monkeypatch.delattr("trl.trainer.utils.is_async_callable")
    with pytest.raises(VariantError, match="^trl 1.15.0 is installed; trl-variants works with trl >= 1.16, < 1.17. "):
        importlib.import_module(f"trl_variants.trainer.{module}")
