"""Discovery that cannot surprise: what is not selected and in which order it is found changes no bit of a run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trl_variants import VariantConfig
from trl_variants.testing import train_config

ROOT = Path(__file__).parent.parent
MINE = """
from trl_variants import ClipResult, Variant, component, hookimpl, use

@component
def {name}(log_ratio, advantages, *, bound: float = {bound}):
    return ClipResult(loss=-log_ratio.exp().clamp(max=bound) * advantages)

@hookimpl
def register_clip_rules():
    return [{name}]

@hookimpl
def register_variants():
    return [Variant(name="v_{name}", extends="dr_grpo", clip_rule=use("{name}"), regularizer="entropy_bonus")]
"""


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Two plugin files."""
    paths = []
    for name, bound in (("early", 1.2), ("late", 1.4)):
        paths.append(tmp_path / f"{name}.py")
        paths[-1].write_text(MINE.format(name=name, bound=bound))
    return list(map(str, paths))


def weights(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    settings = {"variant_overrides": {}, **settings}
    train_config(ROOT / "configs" / "dr_grpo.yaml", folder, steps=2, num_iterations=2, **settings)
    return load_file(folder / "out" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_plugins_that_are_not_selected_change_no_bit(two: list[str], tmp_path: Path) -> None:
    first_party = sorted(str(path) for path in (ROOT / "plugins").glob("*/trl_variants_*/__init__.py"))
    assert len(first_party) >= 5
    sys.path[:0] = (folders := [str(Path(path).parents[1]) for path in first_party])
    try:
        names = [Path(path).parent.name for path in first_party]
        alone = weights(tmp_path / "alone")
        among = weights(tmp_path / "among", plugins=[*names, *two])
    finally:
        sys.path[:] = [path for path in sys.path if path not in folders]
    assert same(alone, among)


def test_the_order_of_registration_changes_no_bit(two: list[str], tmp_path: Path) -> None:
    forward = weights(tmp_path / "forward", plugins=two, variant="v_late")
    backward = weights(tmp_path / "backward", plugins=two[::-1], variant="v_late")
    other = weights(tmp_path / "other", plugins=two, variant="dr_grpo")
    assert same(forward, backward) and not same(forward, other)


def test_a_worker_process_finds_what_its_parent_found(two: list[str], tmp_path: Path) -> None:
    config = VariantConfig(str(tmp_path / "out"), variant="v_early", variant_plugins=two, use_cpu=True, bf16=False)
    (tmp_path / "config.pkl").write_bytes(pickle.dumps(config))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).recipe.clip_rule)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "config.pkl")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "early(bound=1.2)"


def test_every_process_of_a_launcher_finds_the_plugins_of_the_config(two: list[str], tmp_path: Path) -> None:
    code = """
import os, sys
from trl_variants.testing import train_config
chosen = {"plugins": sys.argv[2:], "variant": "v_early", "variant_overrides": {}}
folder = sys.argv[1] + os.environ["RANK"]
log = train_config("configs/dr_grpo.yaml", folder, steps=1, **chosen)
open(folder + ".txt", "w").write(f"trained {len(log)} step")  # what ranks print may be mixed
"""
    (tmp_path / "script.py").write_text(code)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(tmp_path / "script.py")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "rank"), *two],
        cwd=ROOT,
        env={**environment, "TRL_VARIANTS_PLUGINS": "none"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}.txt").read_text() == "trained 1 step"
