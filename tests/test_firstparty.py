"""An error about a name that one of our plugins has says which, and the table behind it is the plugins' own."""

from __future__ import annotations

from collections import defaultdict
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


@pytest.mark.parametrize(
    ("variant", "overrides", "message"),
    [
        (
            "sapo",
            {},
            "No variant named 'sapo'. 'sapo' is in the plugin trl-variants-soft: pip install trl-variants-soft.",
        ),
        ("grpo", {"clip_rule": "clip_cov"}, "'clip_cov' is in the plugin trl-variants-entropy: pip install"),
        ("grpo", {"advantage_estimator": "opo"}, "'opo' is in the plugin trl-variants-baselines: pip install"),
    ],
)
def test_a_name_of_a_plugin_that_is_not_there_says_what_to_install(variant: str, overrides: dict, message: str) -> None:
    with pytest.raises(VariantError) as error:
        resolve(variant, overrides, load_registry("none"))
    assert message in str(error.value)


def test_a_name_that_is_not_ours_says_nothing() -> None:
    assert where_to_get("no_such_name") == ""
