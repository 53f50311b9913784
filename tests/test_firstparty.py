"""An error about a name that one of our plugins has says which, and the table behind it is the plugins' own."""

from __future__ import annotations

from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest

from trl_variants import VariantError, load_registry, resolve
from trl_variants.firstparty import FIRST_PARTY, where_to_get
from trl_variants.slots import SLOTS

FOLDERS = sorted(path.parent for path in (Path(__file__).parent.parent / "plugins").glob("*/pyproject.toml"))


def test_the_table_is_what_the_plugins_register(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in, found = load_registry("none"), defaultdict(set)
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
        registry = load_registry("none", extra=[folder.name.replace("-", "_")])
        for slot in SLOTS:
            found[folder.name] |= registry.components(slot).keys() - built_in.components(slot).keys()
        found[folder.name] |= {*registry.variants} - {*built_in.variants} | {*registry.reward_functions}
    assert FIRST_PARTY == {name: home for home, names in found.items() for name in names}


@pytest.fixture(autouse=True)
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in FIRST_PARTY.values():
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("trl_variants.firstparty.metadata.version", version)


@pytest.mark.parametrize(
    ("variant", "overrides", "message"),
    [
        (
            "sapo",
            {},
            "No variant named 'sapo'. 'sapo' is in the plugin trl-variants-soft: pip install trl-variants-soft.",
        ),
        ("grpo", {"clip_rule": "clip_cov"}, "'clip_cov' is in the plugin trl-variants-entropy: pip install"),
        (  # the nearest, wherever it is
            "vesppo",
            {},
            "No variant named 'vesppo'. Did you mean 'vespo'? It is in the plugin trl-variants-soft: pip install "
            "trl-variants-soft. Registered: ",
        ),
        ("dappo", {}, "No variant named 'dappo'. Did you mean 'dapo'? Registered: "),
        ("grpo", {"advantage_estimator": "opo"}, "'opo' is in the plugin trl-variants-baselines: pip install"),
    ],
)
def test_a_name_of_a_plugin_that_is_not_there_says_what_to_install(variant: str, overrides: dict, message: str) -> None:
    with pytest.raises(VariantError) as error:
        resolve(variant, overrides, load_registry("none"))
    assert message in str(error.value)


def test_a_plugin_that_is_installed_and_left_out_is_not_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_variants.firstparty.metadata.version", lambda name: "0.1.0")
    with pytest.raises(VariantError, match="'sapo' is in the plugin trl-variants-soft, which is installed. Registered"):
        resolve("sapo", registry=load_registry("none"))


def test_a_name_that_is_not_ours_says_nothing() -> None:
    assert where_to_get("no_such_name") == ""
