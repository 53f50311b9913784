"""The author's guide: its code runs, every hook has a section that is right, and what is generated is current."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs.update_guide import GUIDE, updated
from trl_variants import hookspecs, load_registry, resolve
from trl_variants.slots import SLOTS
from trl_variants.testing import check_component, make_rollout

TEXT = GUIDE.read_text(encoding="utf-8")
HOOKS = [name for name in vars(hookspecs) if name.startswith("register_")]
TUTORIAL, REFERENCE = TEXT.split("## The hooks\n")


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def section(hook: str) -> str:
    """What stands under the heading of a hook, which is its signature."""
    return REFERENCE.split(f"### `{hook}()`\n")[1].split("\n### ")[0].split("\n## ")[0]


def test_every_hook_has_a_section_and_every_section_a_hook() -> None:
    assert re.findall(r"^### `(\w+)\(\)`$", REFERENCE, re.MULTILINE) == HOOKS


def test_what_is_generated_is_current() -> None:
    assert updated(TEXT) == TEXT, "run `make table`"


@pytest.mark.parametrize("slot", SLOTS)
def test_a_section_has_the_shape_of_every_input(slot: str) -> None:
    said = section(SLOTS[slot].hook)
    for name in SLOTS[slot].inputs:
        assert re.search(rf"^\| `{name}` \| \S.*\|$", said, re.MULTILINE), name


def test_a_slot_of_both_phases_says_what_an_input_is_in_either() -> None:
    said = section("register_kl_placements")
    for line in (
        "| `rewards` | (N,) weighted sum of the reward functions, as shaped so far; KL in the reward summed in |",
        "| `per_token_loss` | (B, T) loss of each token so far |",
        "| `kl_coef` | the KL coefficient in force, a float |",
        "| `mask` | (N, T) bool, True where a token counts; in the loss (B, T) |",
    ):
        assert line in said.splitlines()
    assert "| `kl` | (N, T) per-token KL to the reference; in the loss (B, T) per-token KL" in said


def example(hook: str, folder: Path) -> str:
    (source,) = blocks(section(hook))
    path = folder / f"{hook}.py"
    path.write_text(source)
    return str(path)


@pytest.mark.parametrize("slot", SLOTS)
def test_the_example_of_a_hook_keeps_the_contract(slot: str, tmp_path: Path) -> None:
    registry = load_registry("none", extra=[path := example(SLOTS[slot].hook, tmp_path)])
    (name,) = (n for n in registry.components(slot) if str(registry.owner(slot, n)) == path)
    assert len(check_component(slot, name, registry=registry)) >= 6


def test_the_example_of_reward_functions_scores_text_and_conversations(tmp_path: Path) -> None:
    registry = load_registry("none", extra=[example("register_reward_functions", tmp_path)])
    brevity = registry.reward_function("brevity")
    assert brevity(completions=["abc", ""], prompts=["p", "p"]) == [-0.003, 0.0]
    assert brevity(completions=[[{"role": "assistant", "content": "ab"}]]) == [-0.002]


def test_the_example_of_variants_resolves(tmp_path: Path) -> None:
    registry = load_registry("none", extra=[example("register_variants", tmp_path)])
    recipe = resolve("careful_grpo", registry=registry)
    assert recipe.clip_rule.parameters["epsilon_low"] == 0.1 and recipe.kl and recipe.kl.controller.name == "adaptive"


def steps() -> list[str]:
    """The file of the tutorial as it stands after each step."""
    files: list[str] = []
    for source in blocks(TUTORIAL):
        if source.startswith("# fading.py, further down\n"):
            files.append(f"{files[-1]}\n\n{source}")
        elif source.startswith("# fading.py\n"):
            files.append(source)
    return files


def test_the_tutorial_runs_step_by_step(tmp_path: Path) -> None:
    found = []
    for number, source in enumerate(steps()):
        path = tmp_path / f"fading_{number}.py"
        path.write_text(source)
        registry = load_registry("none", extra=[str(path)])
        rule = resolve("dapo", {"clip_rule": "fading"}, registry).clip_rule
        found.append((dict(rule.parameters), "fading_dapo" in registry.variants))
    assert found == [({}, False), ({"width": 0.2}, False), ({"width": 0.2}, True), ({"width": 0.2}, True)]
    overrides = {"advantage_estimator": "against_earlier", "advantage_normalizer": "none", "reward_shaper": "none"}
    overrides |= {"sample_filter": "none", "sampling": "mask"}
    recipe = resolve("fading_dapo", {**overrides, "token_weight": "unsure_tokens"}, registry)
    first = recipe.advantages(make_rollout([1.0, 0.0]))
    second = recipe.advantages(make_rollout([1.0, 1.0]), states=first.states)
    assert first.advantages.tolist() == [0.5, -0.5] and second.advantages.tolist() == [0.5, 0.5]
    assert second.states["advantage_estimator.against_earlier"]["mean"] == pytest.approx(0.9 * 0.5 + 0.1 * 1.0)


def test_the_tutorials_test_passes_on_its_plugin(tmp_path: Path) -> None:
    (tmp_path / "fading.py").write_text(steps()[-1])
    (source,) = (block for block in blocks(TUTORIAL) if block.startswith("# test_fading.py\n"))
    (tmp_path / "test_fading.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:]


def trl_variants(line: str, folder: Path) -> str:
    command = [sys.executable, "-m", "trl_variants", *shlex.split(line, comments=True)[1:]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    (tmp_path / "fading.py").write_text(steps()[-1])
    show, demo, new_plugin = re.findall(r"^trl-variants .*$", TUTORIAL, re.MULTILINE)
    (diff,) = re.findall(r"`(trl-variants diff [^`]*)`", TUTORIAL)
    assert "tanh" in trl_variants(show, tmp_path)
    assert "fading width=0.3" in trl_variants(diff, tmp_path)
    assert "s of training" in trl_variants(f"{demo} --steps 2", tmp_path)
    trl_variants(new_plugin, tmp_path)
    (toml,) = blocks(TUTORIAL, "toml")
    assert toml in (tmp_path / "trl-variants-fading" / "pyproject.toml").read_text()


def test_the_plugins_of_this_repository_are_named() -> None:
    for path in GUIDE.parent.glob("*/pyproject.toml"):
        assert re.search(rf"^\| \[{path.parent.name}\]\({path.parent.name}\) \| \w.* \|$", TEXT, re.MULTILINE), path
