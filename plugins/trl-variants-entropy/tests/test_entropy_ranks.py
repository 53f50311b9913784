"""Two processes with half of the rows each do what one does: quantile, covariance and draw are over all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

import trl_variants

ROOT, HERE = Path(trl_variants.__file__).parents[1], Path(__file__).parent
NAMES = ["entropy_clip_cov", "entropy_kl_cov", "entropy_forking_tokens"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    path = os.pathsep.join([str(ROOT), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(HERE / "parallel_entropy.py"),
    ]
    done = subprocess.run(
        [sys.executable, *command, str(folder)],
        cwd=ROOT,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not done.returncode, done.stderr[-5000:]
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_give_the_numbers_of_one(
    name: str, launched: Path, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    monkeypatch.syspath_prepend(str(HERE))
    import parallel_entropy

    alone = parallel_entropy.parallel.run(name, tmp_path, per_device=8, accumulation=1)
    ranks = [torch.load(launched / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]
    assert [run["processes"] for run in (alone, *ranks)] == [1, 2, 2]
    assert ranks[0]["own_mask"].sum() != ranks[1]["own_mask"].sum()  # ranks gather different numbers of tokens
    if name == "entropy_clip_cov":
        assert all(entry["clip_ratio/dual_mean"] > 0.1 for entry in alone["logs"])
    for rank in ranks:
        for one, two in zip(alone["gradients"], rank["gradients"], strict=True):
            assert float(one.norm()) > 0
            torch.testing.assert_close(two, one, atol=1e-5 * float(one.abs().max()), rtol=0)
        torch.testing.assert_close(rank["weights"], alone["weights"], atol=1e-5, rtol=0)
    for one, two in zip(alone["logs"], ranks[0]["logs"], strict=True):
        for key in (key for key in one if key.startswith(("clip_ratio", "entropy", "loss"))):
            assert two[key] == pytest.approx(one[key], abs=2e-5), key
