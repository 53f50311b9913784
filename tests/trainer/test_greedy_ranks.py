"""Greedy completions on two processes: each distinct prompt once, and one process's numbers on both.

As a script: what torchrun starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests import tiny
from tests.trainer.greedy_runs import GREEDY, RESAMPLED, Greedy, greedy_tokens

ROOT = Path(__file__).parents[2]
A, B, C, D, E = tiny.dataset(5)["prompt"]
#: A rollout is 8 rows, 4 on each process. Name: completions per prompt, prompts in order, what each process asks for.
CASES: dict[str, tuple[int, list[str], list[list[str]]]] = {
    "apart": (2, [A, B, C, D], [[A, B], [C, D]]),
    "split": (8, [A], [[A], [A]]),  # the second process owns none, and repeats what the first asks
    "uneven": (1, [A, B, C, D, A, A, E, E], [[A, B, C, D], [E, E, E, E]]),  # it owns one, and repeats it
    "resampled": (2, [A, B, C, D], [[A, B], [C, D]]),
}


def run(name: str, folder: Path) -> dict[str, Any]:
    generations, prompts, _ = CASES[name]
    trainer = Greedy(
        model=tiny.model(),
        reward_funcs=tiny.low_words,
        args=tiny.config(
            folder,
            GREEDY,
            num_generations=generations,
            num_generations_eval=1,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            shuffle_dataset=False,
            max_steps=1,
            variant_overrides=RESAMPLED if name == "resampled" else None,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": [A, B, C, D]}),
        processing_class=tiny.tokenizer(),
    )
    before = trainer.evaluate()["eval_greedy/reward"]
    trainer.asked.clear()
    trainer.train()
    rollout, result, _ = trainer.spy.rollouts[-1]
    return {
        "asked": trainer.asked[0],
        "greedy_rewards": rollout.greedy_rewards,
        "difference": rollout.rewards - rollout.greedy_rewards - result.advantages,
        "logged": trainer.logs[0]["greedy/reward"],
        "evaluated": before,
    }


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("greedy")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", __name__, str(folder)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert not done.returncode, done.stderr[-5000:]
    return folder


def worth(prompt: str) -> float:
    return tiny.low_words([greedy_tokens(tiny.model(), prompt)])[0]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_share_the_prompts_and_agree(name: str, launched: Path) -> None:
    generations, prompts, asked = CASES[name]
    ranks = [torch.load(launched / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]
    assert [rank["asked"] for rank in ranks] == asked
    wanted = [worth(prompt) for prompt in prompts for _ in range(generations)]
    for rank in ranks:
        got = rank["greedy_rewards"].tolist()
        if name == "resampled":  # which groups are kept is up to their completions
            assert all(any(abs(value - w) < 1e-6 for w in wanted) for value in got) and len(got) >= 2
        else:
            assert got == pytest.approx(wanted, abs=1e-6)
            assert rank["logged"] == pytest.approx(sum(wanted) / 8, abs=1e-6)
        assert rank["difference"].abs().max() < 1e-6
        assert rank["evaluated"] == pytest.approx(sum(map(worth, (A, B, C, D))) / 4, abs=1e-6)
    assert torch.equal(ranks[0]["greedy_rewards"], ranks[1]["greedy_rewards"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    for case in CASES:
        torch.save(run(case, where / case), where / f"{case}-{os.environ['RANK']}.pt")
