"""What the README shows is what happens."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trl_variants import load_registry, resolve
from trl_variants.cli.main import app
from trl_variants.trainer.config import VariantConfig
from trl_variants.trainer.launch import parse

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_variant_table_is_the_one_that_is_printed_today() -> None:
    spec = importlib.util.spec_from_file_location("update_table", ROOT / "docs" / "update_table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.updated(TEXT) == TEXT, "run `make table`"


def test_the_yaml_is_valid_and_does_what_its_comments_say(tmp_path: Any) -> None:
    (tmp_path / "my.yaml").write_text(blocks("yaml")[0])
    recipe = parse(["--config", str(tmp_path / "my.yaml")], anywhere=True).training.recipe
    assert recipe.clip_rule.parameters == {"epsilon_low": 0.2, "epsilon_high": 0.3}
    assert recipe.loss_aggregator.name == "seq_mean_token_mean"
    assert not recipe.reward_shapers
    assert [str(term) for term in recipe.regularizers] == ["entropy_bonus(coef=0.001)"]


def test_the_component_of_ones_own_registers_and_resolves(tmp_path: Any) -> None:
    source = next(block for block in blocks("python") if block.startswith("# mine.py"))
    (tmp_path / "mine.py").write_text(source)
    registry = load_registry("none", extra=[str(tmp_path / "mine.py")])
    assert resolve("free_below", registry=registry).clip_rule.name == "no_lower_bound"


def test_the_python_example_names_real_arguments(tmp_path: Any) -> None:
    source = next(block for block in blocks("python") if "VariantTrainer(" in block)
    arguments = source[source.index("VariantConfig(  ") :]
    arguments = arguments[: arguments.index("    ),\n    train_dataset")] + ")"
    config = eval(arguments.replace("outputs/my", str(tmp_path)).replace("output_dir", "use_cpu=True, output_dir"))
    assert isinstance(config, VariantConfig) and config.recipe.variant.name == "dapo"


@pytest.mark.parametrize("verb", re.findall(r"^\| `trl-variants ([\w-]+)", TEXT, re.MULTILINE))
def test_every_verb_in_the_table_exists(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0, result.output


def test_every_field_in_the_migration_table_is_one_that_the_variant_owns() -> None:
    table = TEXT.split("| GRPOConfig |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+\*?)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    owned = {field.name for field in VariantConfig._owned_fields()}
    for name in named:
        assert any(field.startswith(name.rstrip("*")) if name.endswith("*") else field == name for field in owned), name


def test_every_link_to_a_file_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (ROOT / target).exists(), target
