"""The house keeps its shape: what each part may import, and how long a module may be."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trl_variants
from trl_variants import hookspecs
from trl_variants.slots import LEARNING_INPUTS, ROLLOUT_INPUTS, SLOTS

ROOT = Path(trl_variants.__file__).parent
CHECKOUT = ROOT.parent
MODULES = sorted(path for path in ROOT.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Dotted names of everything that a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield node.module or ""


def top(name: str) -> str:
    return name.partition(".")[0]


def inside(*parts: str) -> list[Path]:
    return [path for path in MODULES if path.relative_to(ROOT).parts[: len(parts)] == parts]


@pytest.mark.parametrize("path", inside("components"), ids=lambda path: path.name)
def test_components_import_only_torch_and_the_packages_own_data_and_components(path: Path) -> None:
    allowed = ("trl_variants.components", "trl_variants.data", "trl_variants.declaration")
    standard = {"__future__", "collections", "typing"}
    for name in imported(path):
        assert top(name) in {"torch", *standard} or name.startswith(allowed), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_trainer_imports_trl(path: Path) -> None:
    if path not in inside("trainer"):
        assert "trl" not in {top(name) for name in imported(path)}


@pytest.mark.parametrize("path", inside("cli"), ids=lambda path: path.name)
def test_the_command_line_imports_neither_trl_nor_transformers(path: Path) -> None:
    assert not {"trl", "transformers"} & {top(name) for name in imported(path)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_above_about_300_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 320


PLUGINS = sorted((CHECKOUT / "plugins").glob("*/trl_variants_*/**/*.py"))


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_plugin_imports_public_names_torch_and_pluggy_only(path: Path) -> None:
    """What a reward function scores with it may import when it is called."""
    own, tree = path.relative_to(CHECKOUT / "plugins").parts[1], ast.parse(path.read_text())
    for name in imported(path):
        assert name == "trl_variants" or top(name) != "trl_variants", f"{path} imports {name}, which is not public"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "trl_variants":
            private = {alias.name for alias in node.names} - {*trl_variants.__all__}
            assert not private, f"{path} imports {private}, which is not public"
    at_once = ast.unparse(ast.Module([n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))], []))
    for node in ast.parse(at_once).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        assert {*map(top, names)} <= {"torch", "pluggy", "trl_variants", own, *sys.stdlib_module_names}, path
    assert len(path.read_text().splitlines()) <= 300


def test_there_are_plugins_to_look_at() -> None:
    assert len({path.parents[0].name for path in PLUGINS}) >= 5


def test_every_slot_has_a_hook_and_every_hook_a_docstring() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("register_")}
    assert hooks == {slot.hook for slot in SLOTS.values()} | {"register_variants", "register_reward_functions"}
    assert all(getattr(hookspecs, name).__doc__ for name in hooks)


def _names(module: str) -> list[str]:
    return importlib.import_module(module).__all__


@pytest.mark.parametrize("slot", SLOTS.values(), ids=lambda slot: slot.name)
def test_every_input_of_a_slot_is_explained(slot: object) -> None:
    known = {"rollout": ROLLOUT_INPUTS, "learning": LEARNING_INPUTS, "both": {**ROLLOUT_INPUTS, **LEARNING_INPUTS}}
    assert set(slot.inputs) <= set(known[slot.phase])  # type: ignore[attr-defined]


def test_the_public_names_are_those_of_the_design() -> None:
    for_masks = set(_names("trl_variants.components.masked")) - {"LOG_BOUND", "bounded", "counted", "precise"}
    assert set(trl_variants.__all__) == for_masks | {
        "Advantages",
        "Batch",
        "ClipResult",
        "KL",
        "Recipe",
        "Rollout",
        "Totals",
        "Variant",
        "VariantConfig",
        "VariantError",
        "VariantTrainer",
        "component",
        "hookimpl",
        "load_registry",
        "resolve",
        "use",
    }
    for name in trl_variants.__all__:
        value = getattr(trl_variants, name)
        assert callable(value), name  # a function or class, never the module of the same name
        assert (value.__doc__ or "").strip(), name
