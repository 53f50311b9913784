"""What prefill once saves: `generate` on G copies of each prompt, stock against one prefill per prompt, in CPU time.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.generation

Both run by turns in one process, on one thread. What counts is the ratio of neighbouring runs, printed as min, median
and max over the turns; under greedy decoding the tokens must be the same.
"""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import statistics
import time
from types import SimpleNamespace

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from trl_variants.trainer.prefill import PrefillOnce

PROMPTS, GENERATIONS, VOCABULARY, TURNS = 4, 8, 4096, 5
CASES = [(prompt, new) for prompt in (16, 128, 512) for new in (16, 64)]
TARGETS = {(512, 64): 0.60}


def policy() -> Qwen2ForCausalLM:
    """5.8 million parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def batch(length: int) -> dict[str, Tensor]:
    """Every prompt G times; one of them is shorter by a third."""
    ids = torch.randint(3, VOCABULARY, (PROMPTS, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    ids[1, : length // 3] = mask[1, : length // 3] = 0
    return {
        "input_ids": ids.repeat_interleave(GENERATIONS, dim=0),
        "attention_mask": mask.repeat_interleave(GENERATIONS, dim=0),
    }


def timed(model: Qwen2ForCausalLM, inputs: dict[str, Tensor], new: int, once: bool | None) -> tuple[float, Tensor]:
    """CPU seconds of one generation as TRL does it, and its tokens."""
    state = SimpleNamespace(unwrap_model=lambda wrapped: wrapped, state=SimpleNamespace())
    args = SimpleNamespace(
        prefill_once=once, use_vllm=False, use_transformers_continuous_batching=False, fsdp=None, generation_kwargs=None
    )
    prefill = PrefillOnce(SimpleNamespace(args=args, accelerator=state, model_wrapped=model))
    if once:  # the trial of a model comes once in a run
        with torch.no_grad(), prefill.generating():
            model.generate(**{k: v[:GENERATIONS, :2] for k, v in inputs.items()}, generation_config=settings(1))
    begin = time.process_time()
    with torch.no_grad(), prefill.generating():
        tokens = model.generate(**inputs, generation_config=settings(new))
    return time.process_time() - begin, tokens


def settings(new: int) -> GenerationConfig:
    """Greedy, and always as many tokens as asked for."""
    return GenerationConfig(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=1)


def main() -> None:
    PartialState()  # what the package's logger asks for
    torch.set_num_threads(1)
    model = policy()
    print(f"{PROMPTS} prompts x {GENERATIONS} completions, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")
    print("prompt  new   stock s    once s   ratio min  median  max   target")
    for length, new in CASES:
        inputs = batch(length)
        stock, once = [], []
        for turn in range(TURNS + 1):
            pair = [timed(model, inputs, new, on) for on in ((False, True) if turn % 2 else (True, False))]
            (plain, expected), (quick, tokens) = pair if turn % 2 else reversed(pair)
            assert torch.equal(tokens, expected)
            if turn:  # the first warms up
                stock.append(plain)
                once.append(quick)
        ratios = sorted(b / a for a, b in zip(stock, once, strict=True))
        middle = statistics.median(ratios)
        target = TARGETS.get((length, new))
        verdict = "" if target is None else f"   <= {target:.2f} {'met' if middle <= target else 'MISSED'}"
        print(
            f"{length:6} {new:4} {statistics.median(stock):9.2f} {statistics.median(once):9.2f}"
            f" {ratios[0]:11.3f} {middle:7.3f} {ratios[-1]:.3f}{verdict}",
            flush=True,
        )


if __name__ == "__main__":
    main()
