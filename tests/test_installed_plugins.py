"""Plugins as users have them: installed distributions, modules and files, sound and broken, in any order."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from trl_variants import VariantError, __version__, load_registry, resolve
from trl_variants.registry import Owner, Registry
from trl_variants.testing import make_batch, make_rollout

RULE = """
from trl_variants import ClipResult, component, hookimpl

@component
def {name}(log_ratio, advantages):
    return ClipResult(-{factor} * log_ratio.exp() * advantages)

@hookimpl
def register_clip_rules():
    return [{name}]
"""


class Site:
    """A folder on sys.path that distributions are installed into, as pip leaves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def install(self, distribution: str, version: str, point: str, module: str, source: str) -> None:
        (self.folder / f"{module}.py").write_text(source)
        self.modules.append(module)
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[trl_variants]\n{point} = {module}\n")


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Site]:
    sites = []
    monkeypatch.delenv("TRL_VARIANTS_PLUGINS", raising=False)
    every = metadata.entry_points
    # What else is installed where the tests run is not the tests' business.
    ours = lambda **group: [p for p in every(**group) if p.dist and p.dist.name.startswith("dist-")]  # noqa: E731
    monkeypatch.setattr("trl_variants.discovery.metadata.entry_points", ours)

    def make(name: str) -> Site:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
        sites.append(Site(folder))
        return sites[-1]

    yield make
    for site in sites:
        for module in site.modules:
            sys.modules.pop(module, None)


@pytest.fixture
def site(make_site: Callable[[str], Site]) -> Site:
    return make_site("site")


def error_of(call: Callable, *arguments: object, **named: object) -> VariantError:
    with pytest.raises(VariantError) as error:
        call(*arguments, **named)
    return error.value


def from_source(site: Site, source: str) -> VariantError:
    (site.folder / "wrong_plugin.py").write_text(source)
    site.modules.append("wrong_plugin")
    sys.modules.pop("wrong_plugin", None)
    return error_of(load_registry, "none", extra=["wrong_plugin"])


def test_a_module_whose_hook_is_wrong_is_told_so(site: Site) -> None:
    unmarked = "def register_clip_rules():\n    return []\n"
    assert (
        str(from_source(site, unmarked)) == "wrong_plugin: register_clip_rules is not marked. Put @hookimpl above it."
    )
    takes = "from trl_variants import hookimpl\n@hookimpl\ndef register_clip_rules(config):\n    return []\n"
    error = from_source(site, takes)
    assert str(error).startswith("wrong_plugin: Plugin ")
    assert str(error).endswith("A registration hook takes no argument.")
    fails = "from trl_variants import hookimpl\n@hookimpl\ndef register_clip_rules():\n    raise RuntimeError('boom')\n"
    error = from_source(site, fails)
    assert str(error) == "The plugin 'wrong_plugin' could not be loaded: RuntimeError('boom')"
    assert isinstance(error.__cause__, RuntimeError)


def test_a_helper_that_a_plugin_imports_is_no_misspelt_hook(site: Site) -> None:
    source = "from torch.utils._pytree import register_pytree_node\n" + RULE.format(name="mine", factor=1)
    site.install("dist-a", "1.0", "a", "helped_plugin", source)
    assert "mine" in load_registry().components("clip_rule")


# -- modules and files ------------------------------------------------------------------------------------------------


def test_a_dotted_module_and_a_file_are_plugins_without_being_installed(site: Site, tmp_path: Path) -> None:
    (site.folder / "loose_plugin.py").write_text(RULE.format(name="from_module", factor=1))
    site.modules.append("loose_plugin")
    path = tmp_path / "my plugin.py"
    path.write_text(RULE.format(name="from_file", factor=1))
    registry = load_registry("none", extra=["loose_plugin", str(path)])
    assert str(registry.owner("clip_rule", "from_module")) == "loose_plugin"
    assert str(registry.owner("clip_rule", "from_file")) == str(path)
    # the same file again is the same plugin
    assert "from_file" in load_registry("none", extra=[str(path), str(path)]).components("clip_rule")


def test_a_module_or_file_that_is_not_there_is_an_error() -> None:
    error = error_of(load_registry, "none", extra=["no_such_module_anywhere"])
    assert str(error) == (
        "The plugin 'no_such_module_anywhere' could not be loaded: "
        "ModuleNotFoundError(\"No module named 'no_such_module_anywhere'\")"
    )
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert str(error_of(load_registry, "none", extra=["no/such.py"])) == "There is no plugin file no/such.py."


# -- installed distributions ------------------------------------------------------------------------------------------


def test_an_installed_plugin_is_found_with_its_distribution(site: Site) -> None:
    site.install("dist-a", "1.0", "a", "plugin_a", RULE.format(name="mine", factor=1))
    registry = load_registry()
    assert str(registry.component("clip_rule", "mine")) == "mine (dist-a 1.0)"
    assert registry.plugins[-1] == Owner("a", "dist-a", "1.0")
    recipe = resolve("dr_grpo", {"clip_rule": "mine"}, registry)
    assert str(recipe.clip_rule.owner) == "dist-a 1.0"


def test_the_environment_and_the_argument_choose_among_the_installed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        site.install(f"dist-{name}", "1.0", name, f"plugin_{name}", RULE.format(name=f"rule_{name}", factor=1))

    def found(*arguments: object) -> list[str]:
        return [name for name in load_registry(*arguments).components("clip_rule") if name.startswith("rule_")]

    assert found() == ["rule_a", "rule_b"]
    for variable, expected in (
        ("none", []),
        ("auto", ["rule_a", "rule_b"]),
        ("b", ["rule_b"]),
        ("a, b", ["rule_a", "rule_b"]),
    ):
        monkeypatch.setenv("TRL_VARIANTS_PLUGINS", variable)
        assert found() == expected
    assert found("none") == []  # what the caller says wins
    assert found(["a"]) == ["rule_a"]
    monkeypatch.setenv("TRL_VARIANTS_PLUGINS", "aa")
    assert str(error_of(load_registry)) == "No installed plugin named 'aa'. Did you mean 'a'? Installed: a, b."


def test_a_broken_plugin_that_nobody_selected_is_a_warning_and_all_others_load(site: Site) -> None:  # pains G02
    site.install("dist-a", "1.0", "a", "broken_plugin", "raise ImportError('no such engine')")
    site.install("dist-b", "2.0", "b", "sound_plugin", RULE.format(name="sound", factor=1))
    with pytest.warns(UserWarning) as caught:
        registry = load_registry()
    assert [str(w.message) for w in caught] == [
        "The plugin 'a' of dist-a 1.0 could not be loaded: ImportError('no such engine')"
    ]
    assert registry.component("clip_rule", "sound").owner.distribution == "dist-b"
    assert resolve("grpo", registry=registry).variant.name == "grpo"


def test_a_name_that_a_broken_plugin_may_own_is_an_error_with_the_original_cause(site: Site) -> None:
    site.install("dist-a", "1.0", "a", "broken_plugin", "raise ImportError('no such engine')")
    with pytest.warns(UserWarning):
        registry = load_registry()
    error = error_of(resolve, "grpo", {"clip_rule": "theirs"}, registry)
    assert str(error).endswith(
        "These plugins could not be loaded and may have it: dist-a 1.0 (ImportError: no such engine)."
    )
    assert isinstance(error.__cause__, ImportError)


def test_a_broken_plugin_that_was_asked_for_is_an_error_with_the_original_cause(site: Site) -> None:
    site.install("dist-a", "1.0", "a", "broken_plugin", "1 / 0")
    error = error_of(load_registry, ["a"])
    assert str(error) == "The plugin 'a' of dist-a 1.0 could not be loaded: division by zero"
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_plugin_that_half_registers_is_rolled_back(site: Site) -> None:
    source = RULE.format(name="half", factor=1) + "@hookimpl\ndef register_variants():\n    return [half]\n"
    site.install("dist-a", "1.0", "a", "half_plugin", source)
    with pytest.warns(UserWarning, match="dist-a 1.0: register_variants returned .*, which is not a Variant"):
        registry = load_registry()
    assert "half" not in registry.components("clip_rule")


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_two_distributions_of_one_name_are_an_error_when_it_is_asked_for_in_either_order(
    make_site: Callable, order: tuple
) -> None:
    for name in order:
        source = RULE.format(name="shared", factor=1) + RULE.format(name=f"rule_{name}", factor=1).replace(
            "    return [", "    return [shared, "
        )
        make_site(name).install(f"dist-{name}", "1.0", name, f"plugin_{name}", source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry = load_registry()
    assert {"rule_a", "rule_b"} <= registry.components("clip_rule").keys()
    error = error_of(resolve, "dr_grpo", {"clip_rule": "shared"}, registry)
    assert str(error) == "clip_rule 'shared' is registered by both dist-a 1.0 and dist-b 1.0."
    assert resolve("dr_grpo", {"clip_rule": "rule_a"}, registry).clip_rule.owner.distribution == "dist-a"
    assert "could not be loaded: clip_rule 'shared' is registered by both" in str(error_of(load_registry, ["a", "b"]))


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_two_distributions_with_one_entry_point_name_are_both_loaded(make_site: Callable, order: tuple) -> None:
    for name in order:
        source = RULE.format(name=f"rule_{name}", factor=1)
        make_site(name).install(f"dist-{name}", "1.0", "same", f"plugin_{name}", source)
    registry = load_registry()
    assert {"rule_a", "rule_b"} <= registry.components("clip_rule").keys()


def test_a_third_party_cannot_take_a_built_in_name(site: Site) -> None:
    site.install("dist-a", "1.0", "a", "greedy_plugin", RULE.format(name="ppo_clip", factor=9))
    with pytest.warns(UserWarning, match=f"registered by both trl-variants {__version__} and dist-a 1.0"):
        registry = load_registry()
    assert registry.owner("clip_rule", "ppo_clip").distribution == "trl-variants"


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_neither_order_nor_unselected_plugins_change_a_result(make_site: Callable, order: tuple) -> None:
    def results(registry: Registry) -> list:
        rollout = make_rollout([1.0, 0.0, 0.5, 0.2], group_size=2, lengths=[1, 3, 2, 3])
        batch = make_batch(advantages=[1.0, -1.0], log_probs=[[-1.0, -2.0]] * 2, old_log_probs=[[-1.5, -1.0]] * 2)
        recipe = resolve("dapo", registry=registry)
        return [recipe.advantages(rollout).advantages.tolist(), recipe.loss(batch).loss.item()]

    alone = results(load_registry("none"))
    for name in order:
        source = RULE.format(name=f"rule_{name}", factor=2) + (
            "from trl_variants import Variant\n@hookimpl\ndef register_variants():\n"
            f"    return [Variant(name='variant_{name}', extends='dapo', clip_rule='rule_{name}')]\n"
        )
        make_site(name).install(f"dist-{name}", "1.0", name, f"plugin_{name}", source)
    registry = load_registry()
    assert results(registry) == alone
    assert list(registry.variants)[-2:] == ["variant_a", "variant_b"]
    assert registry.plugins[1:] == [Owner("a", "dist-a", "1.0"), Owner("b", "dist-b", "1.0")]
