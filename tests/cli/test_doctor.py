"""``trl-variants doctor``: what is installed as plugins are, and what is wrong with each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trl_variants import __version__
from trl_variants.cli.main import app
from trl_variants.testing import check_plugin

SOUND = """
from trl_variants import Variant, component, hookimpl

@component
def {name}(rewards, scored, *, shift: float = 0.5):
    return (rewards - shift) * scored

@hookimpl
def register_advantage_estimators():
    return [{name}]
"""


def install(site: Path, name: str, source: str, requires: str = "trl-variants>=0.1") -> None:
    """A distribution as pip leaves it in a folder of sys.path."""
    module = name.replace("-", "_")
    (site / f"{module}.py").write_text(source)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n"
    (info / "METADATA").write_text(metadata)
    (info / "RECORD").write_text(f"{module}.py,,\n")
    (info / "entry_points.txt").write_text(f"[trl_variants]\n{name} = {module}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TRL_VARIANTS_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    # The built-ins are held to the contract in tests/test_contract.py.
    monkeypatch.setattr("trl_variants.diagnosis._checked", _checked_if_not_built_in)
    return tmp_path


def _checked_if_not_built_in(slot: str, name: str, registry: Any) -> Any:
    from trl_variants.conformance import Verdict, check_component

    if registry.owner(slot, name).plugin == "builtins":
        return Verdict((), {})
    return check_component(slot, name, registry=registry)


def doctor(*options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["doctor", "--json", *options])
    return done.exit_code, json.loads(done.stdout)


def mine(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(p["kind"], p["distribution"], p["message"]) for p in found["problems"] if p["distribution"][:3] == "doc"]


def test_a_sound_plugin_is_listed_with_what_it_keeps(site: Path) -> None:
    install(site, "doc-sound", SOUND.format(name="doc_sound_shift"))
    code, found = doctor()
    (plugin,) = (p for p in found["plugins"] if p["plugin"] == "doc-sound")
    assert (plugin["version"], plugin["registers"]) == (
        "1.0",
        [{"slot": "advantage_estimator", "name": "doc_sound_shift"}],
    )
    verdict = plugin["contract"]["advantage_estimator.doc_sound_shift"]
    assert "every_parameter_acts" in verdict["held"] and verdict["exceptions"] == {}
    assert (code, mine(found)) == (0, [])
    assert found["versions"]["trl-variants"] == __version__ and found["versions"]["trl"]
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "doc-sound" in text and "1 component, 0 variants" in text and "Nothing is wrong." in text


def test_a_plugin_that_breaks_the_contract_is_named_with_the_property_and_the_input(site: Path) -> None:
    source = SOUND.replace("(rewards - shift) * scored", "rewards - rewards.mean() - shift")
    install(site, "doc-broken-rule", source.format(name="doc_forgets_the_unscored"))
    code, found = doctor()
    ((kind, _, message),) = mine(found)
    assert (code, kind) == (1, "contract")
    assert message.startswith("advantage_estimator 'doc_forgets_the_unscored': ")
    assert "Smallest input tried that shows it" in message
    code, found = doctor("--quick")
    assert (code, mine(found)) == (0, [])


def test_a_plugin_that_cannot_be_imported_is_broken_and_the_others_are_looked_at(site: Path) -> None:
    install(site, "doc-fails", "import no_such_module_anywhere")
    install(site, "doc-works", SOUND.format(name="doc_works_shift"))
    code, found = doctor("--quick")
    assert code == 1 and "doc-works" in {p["plugin"] for p in found["plugins"]}
    assert mine(found) == [("broken", "doc-fails", "ModuleNotFoundError: No module named 'no_such_module_anywhere'")]


def test_a_name_of_two_plugins_is_disputed(site: Path) -> None:
    install(site, "doc-one", SOUND.format(name="doc_the_same"))
    install(site, "doc-two", SOUND.format(name="doc_the_same"))
    code, found = doctor("--quick")
    assert code == 1
    message = "advantage_estimator 'doc_the_same' is registered by both doc-one 1.0 and doc-two 1.0"
    assert mine(found) == [("disputed", "doc-two", message)]


def test_a_plugin_whose_requirements_are_not_met_is_incompatible(site: Path) -> None:
    install(site, "doc-future", SOUND.format(name="doc_future_shift"), requires="trl-variants>=99")
    install(site, "doc-lacks", SOUND.format(name="doc_lacks_shift"), requires="no-such-distribution")
    code, found = doctor("--quick")
    assert code == 1
    assert mine(found) == [
        ("incompatible", "doc-future", f"requires trl-variants>=99; {__version__} is installed"),
        ("incompatible", "doc-lacks", "requires no-such-distribution, which is not installed"),
    ]


def test_a_module_that_is_imported_in_place_of_the_installed_one_is_shadowed(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "doc-shaded", SOUND.format(name="doc_shaded_shift"))
    nearer = tmp_path_factory.mktemp("nearer")
    (nearer / "doc_shaded.py").write_text(SOUND.format(name="doc_other_shift"))
    monkeypatch.syspath_prepend(nearer)
    code, found = doctor("--quick")
    assert code == 1
    message = f"{nearer / 'doc_shaded.py'} is imported in place of {site / 'doc_shaded.py'}"
    assert mine(found) == [("shadowed", "doc-shaded", message)]


HOSTILE = {
    "doc-skips": ("class Skipped(BaseException): pass\nraise Skipped('no torch here')", "Skipped: no torch here"),
    "doc-exits": ("raise SystemExit(3)", "SystemExit: 3"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_plugin_that_raises_no_exception_is_broken_and_ends_nothing(name: str, site: Path) -> None:
    source, message = HOSTILE[name]
    install(site, name, source)
    assert mine(doctor("--quick")[1]) == [("broken", name, message)]
    assert CliRunner().invoke(app, ["list"]).exit_code == 0


def test_what_a_plugin_prints_is_no_part_of_the_report(site: Path) -> None:
    install(site, "doc-prints", "print('hello from a plugin')\n" + SOUND.format(name="doc_prints_shift"))
    assert mine(doctor("--quick")[1]) == []  # which is JSON to the first byte
    del sys.modules["doc_prints"]
    done = CliRunner().invoke(app, ["list", "--json"])
    assert json.loads(done.stdout) and "hello from a plugin" in done.stderr


def test_metadata_that_cannot_be_read_is_told_and_the_rest_is_looked_at(site: Path) -> None:
    install(site, "doc-odd", SOUND.format(name="doc_odd_shift"), requires="not ! a requirement")
    install(site, "doc-nowhere", SOUND.format(name="doc_nowhere_shift"))
    (site / "doc_nowhere-1.0.dist-info" / "entry_points.txt").write_text("[trl_variants]\nx = not a module!\n")
    install(site, "doc-ageless", SOUND.format(name="doc_ageless_shift"))
    (site / "doc_ageless-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: doc-ageless\n")
    code, found = doctor("--quick")
    assert next(p["version"] for p in found["plugins"] if p["plugin"] == "doc-ageless") is None
    (broken, *_), (incompatible, owner, message) = mine(found)
    assert (code, broken, incompatible, owner) == (1, "broken", "incompatible", "doc-odd")
    assert message.startswith("its requirement 'not ! a requirement' cannot be read: ")
    assert "its entry point names no module: 'not a module!'" in mine(found)[0][2]


def test_a_component_that_exits_is_a_problem_of_its_own(site: Path) -> None:
    install(
        site, "doc-quits", SOUND.replace("return (rewards", "raise SystemExit(4)\n    return (").format(name="doc_q")
    )
    assert mine(doctor()[1]) == [("contract", "doc-quits", "advantage_estimator 'doc_q': SystemExit(4)")]


def test_a_disputed_name_is_one_problem_not_two(site: Path) -> None:
    for name in ("doc-a", "doc-b"):
        install(site, name, SOUND.format(name="doc_disputed"))
    assert [kind for kind, *_ in mine(doctor()[1])] == ["disputed"]


def test_a_narrow_terminal_breaks_no_word(site: Path) -> None:
    install(site, "doc-narrow", SOUND.format(name="doc_narrow_shift"))
    text = CliRunner().invoke(app, ["doctor", "--quick"], env={"COLUMNS": "40"}).stdout
    assert "  doc-narrow 1.0\n    1 component, 0 variants; contract\n    not checked\n" in text


def test_check_plugin_takes_all_of_a_distribution_and_no_namesake(site: Path) -> None:
    install(site, "doc-two-in-one", SOUND.format(name="doc_first"))
    (site / "doc_second.py").write_text(SOUND.format(name="doc_second"))
    points = "[trl_variants]\nfirst = doc_two_in_one\nshared = doc_second\n"
    (site / "doc_two_in_one-1.0.dist-info" / "entry_points.txt").write_text(points)
    install(site, "doc-namesake", SOUND.format(name="doc_third"))
    (site / "doc_namesake-1.0.dist-info" / "entry_points.txt").write_text("[trl_variants]\nshared = doc_namesake\n")
    assert [*check_plugin("doc-two-in-one")] == ["advantage_estimator.doc_first", "advantage_estimator.doc_second"]
    assert [*check_plugin("doc-namesake")] == ["advantage_estimator.doc_third"]
