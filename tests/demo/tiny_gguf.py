"""A GGUF file of a few kilobytes, with weights, tokenizer and chat template, as SmolLM2's has them."""

from __future__ import annotations

from pathlib import Path

import numpy
from gguf import GGUFWriter

HIDDEN, INNER, LAYERS, HEADS = 16, 32, 2, 2
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write(path: Path) -> Path:
    """Write the file, and return its path."""
    tokens = ["<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "ab"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    random = numpy.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{layer}.{name}": (INNER, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, INNER)
    for name, shape in shapes.items():
        weights = random.normal(size=shape) * 0.1 if len(shape) == 2 else numpy.ones(shape)
        writer.add_tensor(f"{name}.weight", weights.astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
