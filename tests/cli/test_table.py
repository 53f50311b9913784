"""`trl-variants table`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.reading import REGISTRY, data, out, run, table_of
from trl_variants.describe import PARTS

pytestmark = pytest.mark.usefixtures("builtins_only")


def test_table_has_a_row_for_every_variant_and_says_what_differs_from_grpo() -> None:
    rows = {row["variant"]: row for row in data("table")}
    assert list(rows) == list(REGISTRY.variants)
    assert rows["grpo"]["differs"] == []
    assert rows["dapo"]["differs"] == ["clip", "aggregation", "kl", "besides"]
    assert rows["dapo"]["besides"] == [
        "filter zero_variance",
        "reward soft_overlong",
        "weight rollout_correction",
        "G ≥ 2",
    ]
    assert set(rows["dapo"]) == {"variant", *PARTS, "differs", "paper"}


NOTES = "Emphasised: what differs from grpo. In every variant: weight rollout_correction.\n"


def test_table_as_markdown_emphasises_what_differs_from_grpo() -> None:
    text = out("table", "--markdown")
    rows = {row[0]: row[1:] for row in table_of(text)}
    assert rows["variant"] == ["baseline", "scaling", "ratio", "clip", "aggregation", "KL", "besides"]
    assert rows["[grpo](https://arxiv.org/abs/2402.03300)"] == [
        "group_mean",
        "group_std",
        "token",
        "ppo_clip 0.2",
        "seq_mean_token_mean",
        "k3 in loss, β 0.04",
        "G ≥ 2",
    ]
    assert rows["[dapo](https://arxiv.org/abs/2503.14476)"] == [
        "group_mean",
        "group_std",
        "token",
        "**ppo_clip 0.2/0.28**",
        "**token_mean**",
        "**none**",
        "**filter zero_variance**, **reward soft_overlong**, G ≥ 2",
    ]
    assert rows["trl_bnpo"][0] == "**group_mean zero_constant=false**"
    assert len(rows) == len(REGISTRY.variants) + 1
    assert text.endswith(f"\n\n{NOTES}")


def test_table_on_a_wide_terminal_has_a_line_for_a_variant() -> None:
    text = out("table", columns=300)
    assert re.search(
        r"^dapo +group_mean +group_std +token +\*ppo_clip 0.2/0.28\* +\*token_mean\* +\*none\* +"
        r"\*filter zero_variance\*, \*reward soft_overlong\*, G ≥ 2$",
        text,
        re.MULTILINE,
    )
    assert text.endswith(NOTES)


def test_table_on_a_narrow_terminal_shows_grpo_whole_and_of_the_others_what_differs() -> None:
    text = out("table", columns=80)
    blocks = {match[0]: match[1] for match in re.findall(r"^  (\w+) +(.*(?:\n {25}.*)*)", text, re.MULTILINE)}
    assert list(blocks) == list(REGISTRY.variants)
    assert [line.split()[0] for line in blocks["grpo"].split("\n")] == [*PARTS[:5], "KL", "besides"]
    assert [" ".join(line.split()) for line in blocks["cispo"].split("\n")] == [
        "clip cispo 5",
        "aggregation token_mean",
        "KL none",
    ]
    assert " ".join(text.split()).endswith(
        "Shown: what differs from grpo. A wider terminal, --markdown and --json show every part. "
        "In every variant: weight rollout_correction."
    )


def test_table_leaves_out_a_variant_that_cannot_be_resolved_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(
        "from trl_variants import Variant, hookimpl\n"
        "@hookimpl\n"
        "def register_variants():\n"
        "    return [Variant(name='odd', extends='grpo', importance_ratio='tokn', token_weight='none')]\n"
    )
    result = run("table", "--json", "--plugins", str(path))
    assert len(json.loads(result.stdout)) == len(REGISTRY.variants)
    assert result.stderr.startswith(
        "Warning: variant 'odd' is left out: No importance_ratio named 'tokn'. Did you mean 'token'?"
    )


def test_what_stands_beside_every_variant_is_said_once_and_no_longer_if_one_lacks_it(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(
        "from trl_variants import Variant, hookimpl\n"
        "@hookimpl\n"
        "def register_variants():\n"
        "    return [Variant(name='bare', extends='grpo', token_weight='none')]\n"
    )
    text = out("table", "--markdown", "--plugins", str(path))
    assert "In every variant" not in text
    rows = {row[0]: row[-1] for row in table_of(text)}
    assert rows["bare"] == "G ≥ 2"
    assert rows["trl_grpo"] == "weight rollout_correction, G ≥ 2"
