"""What two processes run, and one process with the same micro-batches: half of their rows on each of the two."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.trainer import parallel

HERE = {"variant_plugins": ["trl_variants_entropy"], "num_iterations": 2, "max_steps": 4}
#: Bounds and shares with which a handful of tokens is acted on in every micro-batch.
CLIP = {"clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
#: No filter and one micro-batch a step, so that the processes' micro-batches hold the rows of the one's.
PLAIN = {"sample_filter": "none", "reward_shaper": "none", "sampling": "mask"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "entropy_clip_cov": ("clip_cov", {**HERE, "overrides": {**PLAIN, "clip_rule": CLIP}}),
    "entropy_kl_cov": ("kl_cov", {**HERE, "overrides": {**PLAIN, "clip_rule": {"kl_cov_ratio": 0.2}}}),
    "entropy_forking_tokens": ("forking_tokens", {**HERE, "overrides": PLAIN}),
}
parallel.CASES.update(CASES)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    parallel.unshuffled()
    rank = int(os.environ["RANK"])
    for name in CASES:
        torch.save(parallel.run(name, folder / name, per_device=4, accumulation=1), folder / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
