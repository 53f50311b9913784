"""Prefill once: the same tokens as stock generation from fewer tokens run, and a reason wherever it steps aside."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer

from tests import tiny
from tests.trainer import runs
from trl_variants import VariantError
from trl_variants.trainer import prefill
from trl_variants.trainer import prefill_reasons as reasons
from trl_variants.trainer.kv_cache import RoomyLayer
from trl_variants.trainer.prefill import PrefillOnce

#: Lengths 6, 2, 4 and 1, in an order in which equal prompts are not neighbours.
PROMPTS = [[5, 9, 3, 7, 11, 4], [8, 6], [3, 3, 14, 9], [12]]
ORDER = [0, 1, 0, 2, 3, 1, 0, 2]
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def batch(order: list[int] = ORDER, prompts: list[list[int]] = PROMPTS) -> dict[str, Tensor]:
    """Prompts by number, padded on the left."""
    rows = [prompts[number] for number in order]
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def prefilling(model: Any, prefill_once: bool | None = None, **settings: Any) -> PrefillOnce:
    """Prefill once for a model, with no more of a trainer than it needs."""
    accelerator = SimpleNamespace(unwrap_model=lambda wrapped: wrapped, state=SimpleNamespace())
    args = tiny.config("unused", prefill_once=prefill_once, **settings)
    return PrefillOnce(SimpleNamespace(args=args, accelerator=accelerator, model_wrapped=model))


def generated(
    model: Any, once: PrefillOnce | None = None, inputs: Any = None, seed: int = 0, **settings: Any
) -> Tensor:
    """What generate returns, by prefilling once or not."""
    defaults = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
    config = GenerationConfig(**{**defaults, **settings})
    torch.manual_seed(seed)
    with torch.no_grad(), (once or prefilling(model, prefill_once=False)).generating():
        return model.generate(**(batch() if inputs is None else inputs), generation_config=config)


class Tokens:
    """How many tokens go through a module in each of its forwards."""

    def __init__(self, module: Any) -> None:
        self.forwards: list[int] = []
        module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: Any, args: Any, kwargs: Any) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        self.forwards.append(ids.numel())


def built(kind: str, scale: float = 4.0, **settings: Any) -> Any:
    """A tiny model of a family, with weights that make a choice."""
    torch.manual_seed(0)
    made = getattr(hf, f"{kind}ForCausalLM", None) or getattr(hf, f"{kind}LMHeadModel")
    names = {"GPT2": "GPT2Config"}
    model = made(getattr(hf, names.get(kind, f"{kind}Config"))(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.eval()


FAMILIES: dict[str, Any] = {
    "qwen2": lambda: tiny.model().eval(),
    "llama": lambda: built("Llama", **SIZES),
    "llama, eager": lambda: built("Llama", **SIZES, attn_implementation="eager"),
    "tied embeddings": lambda: built("Qwen2", **SIZES, tie_word_embeddings=True),
    "learned positions": lambda: built("GPT2", **GPT2),
    "alibi": lambda: built("Bloom", vocab_size=32, hidden_size=16, n_layer=2, n_head=2, pad_token_id=0, eos_token_id=1),
    "parallel blocks": lambda: built("GPTNeoX", **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "experts": lambda: built("Mixtral", **SIZES, num_local_experts=4, num_experts_per_tok=2),
    "grouped queries": lambda: built("Qwen3", **{**SIZES, "num_key_value_heads": 1}, head_dim=8),
}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "eos_token_id": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_from_fewer(family: str) -> None:
    model = FAMILIES[family]()
    once = prefilling(model)
    stock = generated(model)
    assert torch.equal(generated(model, once), stock)
    assert once._said == set()
    assert len({tuple(row) for row in stock[:, 6:].tolist()}) > 1
    tokens = Tokens(model.base_model)
    assert torch.equal(generated(model, once), stock)
    assert tokens.forwards[:2] == [4 * 5, 8]


@pytest.mark.parametrize("order", [[0, 0, 0, 0], [2, 2, 3, 3], [0, 1, 1, 0, 2, 3], [1, 1, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_orders_and_dtypes(order: list[int], dtype: torch.dtype) -> None:
    model = tiny.model(dtype=dtype).eval()
    once = prefilling(model)
    inputs = batch(order)
    assert torch.equal(generated(model, once, inputs), generated(model, inputs=inputs))
    assert once._said == set()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.8, "repetition_penalty": 1.3},
        {"min_new_tokens": 3, "suppress_tokens": [4]},
        {"eos_token_id": [1, 5, 6, 7]},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_same_samples_for_the_same_seed(settings: dict[str, Any]) -> None:
    model = tiny.model().eval()
    once = prefilling(model)
    stock = [generated(model, seed=seed, do_sample=True, **settings) for seed in range(3)]
    assert not torch.equal(stock[0], stock[1])
    for seed in range(3):  # the first also tries the model out, which draws nothing
        assert torch.equal(generated(model, once, seed=seed, do_sample=True, **settings), stock[seed])
        left = torch.random.get_rng_state()
        generated(model, seed=seed, do_sample=True, **settings)
        assert torch.equal(torch.random.get_rng_state(), left)
    assert once._said == set()


def test_logits_are_those_of_one_forward() -> None:
    """In float64, each token's logits against a forward of its whole sequence, without a cache."""
    model = tiny.model(dtype=torch.float64).eval()
    inputs, seen = batch(), []
    hook = model.lm_head.register_forward_hook(lambda *call: seen.append(call[2][:, -1]))
    out = generated(model, prefilling(model), eos_token_id=None)
    hook.remove()
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(out), 6, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(input_ids=out, attention_mask=mask, position_ids=positions).logits
    for step, logits in enumerate(seen[-6:]):
        torch.testing.assert_close(logits, whole[:, 5 + step], atol=1e-10, rtol=1e-10)


def test_distinct_prompts_are_run_once() -> None:
    model = tiny.model().eval()
    once = prefilling(model)
    generated(model, once)  # tries the model out
    tokens = Tokens(model.model)
    generated(model, once, eos_token_id=None)
    assert tokens.forwards == [4 * 5, *[8] * 6]
    tokens.forwards.clear()
    generated(model, eos_token_id=None)
    assert tokens.forwards == [8 * 6, *[8] * 5]


def test_a_layer_with_room_holds_what_a_plain_one_does() -> None:
    draw = torch.Generator().manual_seed(0)
    start, more = (torch.randn(2, 3, 2, n, 4, generator=draw) for n in (5, 120))
    plain, roomy = DynamicLayer(), RoomyLayer(*start)
    plain.update(*start)
    for step in range(120):
        added = more[:, 0 if step <= 90 else 1 :, ..., step : step + 1 + step % 3, :]
        for ours, theirs in zip(roomy.update(*added), plain.update(*added), strict=True):
            assert torch.equal(ours, theirs)
        assert roomy.get_mask_sizes(1) == plain.get_mask_sizes(1)
        for layer in (roomy, plain):
            if step == 30:
                layer.crop(-7)
            elif step == 60:
                layer.reorder_cache(torch.tensor([2, 0, 0]))
            elif step == 90:
                layer.batch_select_indices(torch.tensor([1, 2]))
            elif step == 100:
                layer.reset()
    assert torch.equal(roomy.update(*added.double())[0], plain.update(*added.double())[0])
    assert roomy.keys.dtype == torch.float64


def test_a_layer_with_room_does_not_copy_every_token() -> None:
    layer = RoomyLayer(*torch.ones(2, 1, 1, 400, 1))
    places = []
    for _ in range(400):
        layer.update(*torch.ones(2, 1, 1, 1, 1))
        places.append(layer.keys.data_ptr())
    assert len({a for a, b in zip(places, places[1:], strict=False) if a != b}) <= 7
    assert layer.keys.shape[-2] == 800 and bool((layer.keys == 1).all())
    assert layer.keys.untyped_storage().nbytes() <= 4 * (800 + 100)
    assert type(hf.DynamicCache(config=tiny.model().config).layers[0]) is DynamicLayer  # none was registered


def test_the_mask_tells_prompts_apart() -> None:
    """The padding token may be one of the prompt's own."""
    model = tiny.model().eval()
    once = prefilling(model)
    ids = torch.tensor([[0, 0, 5, 9]] * 4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])
    assert prefill._distinct(ids, mask) == ([0, 1, 2], [0, 1, 2, 0])
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(generated(model, once, inputs), generated(model, inputs=inputs))


@pytest.mark.parametrize("inputs", [batch([0, 1, 2, 3]), batch([0, 0], [[5]])], ids=["distinct", "one token"])
def test_nothing_to_save(inputs: dict[str, Tensor]) -> None:
    model = tiny.model().eval()
    once, tokens = prefilling(model, prefill_once=True), Tokens(model.model)
    stock = generated(model, inputs=inputs, eos_token_id=None)
    counted = list(tokens.forwards)
    tokens.forwards.clear()
    assert torch.equal(generated(model, once, inputs, eos_token_id=None), stock)
    assert tokens.forwards == counted
    assert once._said == set()


# -- stepping aside -------------------------------------------------------------------------------------------------


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


def dropping() -> Any:
    return built("GPT2", **GPT2).train()


def adapter(config: Any) -> Any:
    return get_peft_model(tiny.model(), config).eval()


LORA = {"target_modules": ["q_proj", "v_proj", "up_proj"], "r": 4, "task_type": "CAUSAL_LM"}
SLIDING = {**SIZES, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
LONG = rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=8, factor=2.0)
MODELS: dict[str, tuple[Any, str]] = {
    "sliding": (lambda: built("Mistral", **SIZES, sliding_window=4), "DynamicSlidingWindowLayer"),
    "layer types": (lambda: built("Qwen2", **SLIDING), "sliding_attention"),
    "hybrid": (lambda: built("Gemma2", **SIZES, head_dim=8, sliding_window=4), "sliding_attention"),
    "state space": (
        lambda: built("Mamba", vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=0),
        "linear_attention",
    ),
    "dynamic rope": (lambda: built("Llama", **SIZES, rope_parameters=rope("dynamic", factor=2.0)), "dynamic"),
    "long rope": (lambda: built("Phi3", **SIZES, rope_parameters=LONG), "longrope"),
    "dropout": (dropping, "disable_dropout: true"),
    "lora dropout": (lambda: adapter(LoraConfig(**LORA, lora_dropout=0.1)).train(), "disable_dropout: true"),
    "attention dropout": (lambda: built("Llama", **SIZES, attention_dropout=0.1).train(), "disable_dropout: true"),
    "prefix": (lambda: adapter(PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)), "PREFIX_TUNING"),
    "prompt": (lambda: adapter(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)), "PROMPT_TUNING"),
    "alora": (lambda: adapter(LoraConfig(**LORA, alora_invocation_tokens=[9])), "aLoRA"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_it_leaves_alone(case: str, caplog: Any) -> None:
    make, reason = MODELS[case]
    model = make()
    once = prefilling(model, prefill_once=True)
    stock = generated(model)
    with caplog.at_level(logging.INFO, logger=prefill.__name__):
        assert torch.equal(generated(model, once), stock)
        assert torch.equal(generated(model, once), stock)
    (record,) = [entry for entry in caplog.records if entry.name == prefill.__name__]
    assert reason in record.getMessage()
    assert record.levelname == "WARNING"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation"),
        ({"cache_implementation": "static"}, "cache_implementation is static"),
        ({"cache_implementation": "dynamic"}, "cache_implementation is dynamic"),
        ({"use_cache": False}, "use_cache is false"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size is set"),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["given", "model"])
def test_generation_it_leaves_alone(settings: dict[str, Any], reason: str, where: str, caplog: Any) -> None:
    model = tiny.model().eval()
    once = prefilling(model)
    if "prompt_lookup_num_tokens" in settings:  # takes one row only, so that generate itself would fail
        given = GenerationConfig(**settings, do_sample=True)
        assert reason in (reasons.generation_reason(given, model) or "")
        return
    if where == "model" and not settings.get("do_sample"):
        for name, value in settings.items():
            setattr(model.generation_config, name, value)
        settings = {}
    stock = generated(model, disable_compile=True, **settings)
    with caplog.at_level(logging.INFO, logger=prefill.__name__):
        assert torch.equal(generated(model, once, disable_compile=True, **settings), stock)
    (record,) = [entry for entry in caplog.records if entry.name == prefill.__name__]
    assert reason in record.getMessage()
    assert record.levelname == "INFO"


def test_contrastive_search_is_left_alone() -> None:
    model = tiny.model()
    given = GenerationConfig(do_sample=False, penalty_alpha=0.6, top_k=4)
    assert "contrastive_search" in (reasons.generation_reason(given, model) or "")


def test_other_inputs_are_left_alone() -> None:
    model = tiny.model().eval()
    once, inputs = prefilling(model), batch()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    stock = generated(model, inputs=inputs)
    assert torch.equal(generated(model, once, {**inputs, "position_ids": positions}), stock)
    assert once._said == {"generate is given position_ids"}


def test_a_cache_of_the_callers_is_kept() -> None:
    model = tiny.model().eval()
    once, inputs = prefilling(model), batch([0, 0])
    name = reasons.cache_name(model)
    cache = prefill._prefill(model, inputs["input_ids"], inputs["attention_mask"])
    assert torch.equal(generated(model, once, {**inputs, name: cache}), generated(model, inputs=inputs))
    assert once._said == set() and not once._tried


def test_encoder_decoder_and_multimodal_models_are_left_alone() -> None:
    t5 = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    assert "encoder-decoder" in (reasons.model_reason(t5) or "")
    llava = SimpleNamespace(config=hf.LlavaConfig(), forward=None)
    assert "is multimodal" in (reasons.model_reason(llava) or "")
    assert "neither a transformers model" in (reasons.inner_model(torch.nn.Linear(1, 1))[1] or "")


@pytest.mark.parametrize(
    ("state", "reason"),
    [({"fsdp_plugin": object()}, "FSDP"), ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "ZeRO-3")],
)
def test_sharded_models_are_left_alone(state: dict[str, Any], reason: str) -> None:
    model = tiny.model().eval()
    once = prefilling(model)
    once._trainer.accelerator.state = SimpleNamespace(**state)
    assert torch.equal(generated(model, once), generated(model))
    assert reason in once._said.pop()
    once._trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=2))
    generated(model, once)
    assert once._said == set() and once._tried


def test_a_model_whose_cache_goes_wrong_is_left_alone() -> None:
    """Tried out once: a model that moves positions once it has a cache."""

    class Forgetful(hf.Qwen2ForCausalLM):
        @functools.wraps(hf.Qwen2ForCausalLM.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            if cache is not None and cache.get_seq_length():
                kwargs["position_ids"] = kwargs["position_ids"] + 3
            return super().forward(*args, **kwargs)

    plain = tiny.model().eval()
    model = Forgetful(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    once = prefilling(model)
    stock = generated(model)
    assert torch.equal(generated(model, once), stock)
    assert "come out different" in once._said.pop()


# -- what is left behind --------------------------------------------------------------------------------------------


def test_generate_is_restored() -> None:
    model = tiny.model().eval()
    once = prefilling(model)
    with once.generating():
        assert "generate" in vars(model)
    assert "generate" not in vars(model)
    with pytest.raises(KeyError, match="stop"), once.generating():
        raise KeyError("stop")
    assert "generate" not in vars(model)
    with pytest.raises(ValueError, match="greater than 0"):
        generated(model, once, max_new_tokens=-1)
    assert "generate" not in vars(model)
    model.generate = own = lambda **_: "own"
    with once.generating():
        assert model.generate is not own
    assert model.generate is own


def test_nothing_is_left_on_the_model(tmp_path: Any) -> None:
    model = tiny.model().eval()
    before = set(vars(model))
    once = prefilling(model)
    first, second = generated(model, once), generated(model, once)
    assert torch.equal(first, second)
    assert set(vars(model)) == before
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(generated(twin), first)
    model.save_pretrained(tmp_path)
    assert torch.equal(generated(hf.AutoModelForCausalLM.from_pretrained(tmp_path)), first)


def test_the_cache_is_let_go(monkeypatch: Any) -> None:
    model = tiny.model().eval()
    once, made = prefilling(model), []
    fill = prefill._prefill

    def watched(*args: Any) -> Any:
        cache = fill(*args)
        made.extend([weakref.ref(cache), weakref.ref(cache.layers[0].keys)])
        return cache

    monkeypatch.setattr(prefill, "_prefill", watched)
    gc.disable()
    try:
        generated(model, once)
        assert len(made) == 4 and not any(ref() is not None for ref in made)
    finally:
        gc.enable()


def test_weights_that_move_are_used() -> None:
    model = tiny.model().eval()
    once = prefilling(model)
    before = generated(model, once)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.add_(0.5)
    after = generated(model, once)
    assert torch.equal(after, generated(model)) and not torch.equal(after, before)


# -- adapters, precision and whole runs -----------------------------------------------------------------------------


def test_lora() -> None:
    model = adapter(LoraConfig(**LORA, init_lora_weights=False))
    once = prefilling(model)
    stock = generated(model)
    with model.disable_adapter():
        assert not torch.equal(generated(model), stock)
    assert torch.equal(generated(model, once), stock)
    assert once._said == set()
    tokens = Tokens(model.get_base_model().model)
    assert torch.equal(generated(model, once), stock)
    assert tokens.forwards[:2] == [4 * 5, 8]
    with model.disable_adapter():
        assert torch.equal(generated(model, once), generated(model))


RUNS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "several steps": {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4},
    "lora": {"options": {"peft_config": LoraConfig(**LORA)}},
    "lora in bf16": {"options": {"peft_config": LoraConfig(**LORA)}, "bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1},
    "evaluation by groups": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
}


@pytest.mark.parametrize("case", RUNS)
def test_training_is_the_same(case: str, tmp_path: Any) -> None:
    settings = {**RUNS[case]}
    options = settings.pop("options", {})
    if "eval_strategy" in settings:
        options = {**options, "eval_dataset": tiny.dataset(4)}

    def run(on: bool) -> tuple[Any, list[int]]:
        trainer = runs.build(tmp_path, prefill_once=on, options=options, **settings)
        base = trainer.model.get_base_model() if "peft_config" in options else trainer.model
        tokens = Tokens(base.model)
        trainer.train()
        return trainer, tokens.forwards

    (plain, stock), (quick, fewer) = run(False), run(True)
    assert len(quick.generated) == len(plain.generated)
    for ours, theirs in zip(quick.generated, plain.generated, strict=True):
        assert torch.equal(ours["completion_ids"], theirs["completion_ids"])
        assert torch.equal(ours["advantages"], theirs["advantages"])
    assert quick.losses == plain.losses
    assert torch.equal(runs.weights(quick.model), runs.weights(plain.model))
    evaluated = [[log["eval_reward"] for log in t.state.log_history if "eval_reward" in log] for t in (plain, quick)]
    assert evaluated[0] == evaluated[1] and bool(evaluated[0]) == ("eval_strategy" in settings)
    assert quick._prefill_once._said == set() and list(quick._prefill_once._tried.values()) == [None]
    assert fewer != stock and "generate" not in vars(quick.model)


@pytest.mark.parametrize("lora", [False, True])
def test_bf16_caches_have_the_dtype_of_stock_ones(lora: bool, tmp_path: Any, monkeypatch: Any) -> None:
    """Where autocast is on, it is on for the prompt too. (For adapters it is off: PEFT generates inside of it.)"""
    kinds: dict[bool, set[tuple[torch.dtype, torch.dtype]]] = {}
    update = DynamicLayer.update
    for on in (False, True):
        seen = kinds[on] = set()

        def watched(layer: Any, keys: Tensor, values: Tensor, *args: Any, seen: Any = seen, **kwargs: Any) -> Any:
            seen.add((keys.dtype, values.dtype))
            return update(layer, keys, values, *args, **kwargs)

        monkeypatch.setattr(DynamicLayer, "update", watched)
        options = {"peft_config": LoraConfig(**LORA)} if lora else {}
        runs.trained(tmp_path, prefill_once=on, share_prompts="never", bf16=True, max_steps=1, options=options)
    assert kinds[True] == kinds[False] and len(kinds[True]) == 1
    assert lora or kinds[True] == {(torch.float32, torch.bfloat16)}  # rotation is by float32 numbers


def test_the_model_inside_ddp(tmp_path: Any) -> None:
    trainer = runs.build(tmp_path, prefill_once=True)
    tokens = Tokens(trainer.model.model)
    prompts = [[5, 6, 7, 8], [9, 4]] * 3
    trainer.generation_config.do_sample = False
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        trainer.model_wrapped = torch.nn.parallel.DistributedDataParallel(trainer.model)
        quick, _ = trainer._generate_single_turn(prompts, None, {}, 3)
        assert 2 * 3 in tokens.forwards and 6 * 4 not in tokens.forwards
        trainer.args.prefill_once = False
        assert trainer._generate_single_turn(prompts, None, {}, 3)[0] == quick
    finally:
        torch.distributed.destroy_process_group()


def test_tools_go_on_from_distinct_prompts(tmp_path: Any) -> None:
    trainer = runs.build(tmp_path, prefill_once=True)
    tokens = Tokens(trainer.model.model)
    for prompts in ([[5, 6, 7]] * 4, [[5, 6, 7, n] for n in range(3, 7)]):
        ids, _ = trainer._generate_single_turn(prompts, None, {}, 4)
        assert len(ids) == 4
    assert 4 * 4 in tokens.forwards and 4 * 3 not in tokens.forwards[3:]
    assert trainer._prefill_once._said == set()


# -- the config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_vllm": True}, "vLLM"),
        ({"use_transformers_continuous_batching": True}, "continuously"),
        ({"cache_implementation": "static"}, "cache_implementation is static"),
        ({"generation_kwargs": {"num_beams": 4}}, "beam_sample"),
        ({"generation_kwargs": {"use_cache": False}}, "use_cache is false"),
        ({"variant": "reinforce", "num_generations": 1}, "no prompt repeats"),
    ],
    ids=str,
)
def test_a_config_that_rules_it_out(settings: dict[str, Any], reason: str, tmp_path: Any) -> None:
    with pytest.raises(VariantError, match=f"prefill_once is true, and cannot apply: .*{reason}"):
        tiny.config(tmp_path, prefill_once=True, **settings)
    for value in (None, False):
        assert tiny.config(tmp_path, prefill_once=value, **settings).prefill_once is value


def test_engines_of_the_launcher(tmp_path: Any, monkeypatch: Any) -> None:
    args = tiny.config(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "FSDP" in (reasons.config_reason(args) or "")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert reasons.config_reason(args) is None
    args.hf_deepspeed_config = SimpleNamespace(is_zero3=lambda: True)
    assert "ZeRO-3" in (reasons.config_reason(args) or "")


def test_vllm_is_left_alone() -> None:
    model = tiny.model().eval()
    once = prefilling(model)
    once._trainer.args.use_vllm = True
    with once.generating():
        assert "generate" not in vars(model)
    assert "vLLM" in once._said.pop()
