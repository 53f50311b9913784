"""The demo's model with its tokenizer: built on the spot, from a GGUF file, a folder or the hub."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from trl_variants.errors import VariantError

__all__ = ["SMOLLM2", "find_gguf", "has_bf16", "load_pretrained"]

#: The folder in which `trl_variants.demo.fetch` puts the model.
SMOLLM2 = "smollm2"
FETCH = "python -m trl_variants.demo.fetch"


def load_pretrained(name: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer, in float32.

    Args:
        name: ``smollm2``, a local folder (with a GGUF file or as transformers saves it), or a hub id.

    Returns:
        Model and tokenizer.

    Raises:
        VariantError: It is not there; the message says what to run.
    """
    from transformers import AutoTokenizer

    gguf = find_gguf(name)
    if gguf is not None:
        model, tokenizer = _from_gguf(gguf)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
            model = _causal_lm(name)
        except (OSError, ValueError) as error:
            raise VariantError(
                f"The model '{name}' could not be loaded: {error} "
                f"Give tiny, {SMOLLM2}, a local folder or the id of a model on the hub."
            ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def find_gguf(name: str) -> Path | None:
    """The GGUF file that a name stands for, or None when it stands for something else.

    Raises:
        VariantError: ``smollm2`` has not been fetched, or a folder holds several GGUF files.
    """
    folder = Path(name)
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else [folder] if folder.suffix == ".gguf" else []
    if name == SMOLLM2 and not files:
        raise VariantError(
            f"There is no SmolLM2 in {folder.resolve()}. Run `make smollm2`, or `{FETCH}`, to fetch it (93 MB)."
        )
    if not files or (folder / "config.json").exists():
        return None
    if len(files) > 1:
        raise VariantError(f"{folder} holds several GGUF files; give one of them: {', '.join(map(str, files))}.")
    if not files[0].is_file():
        raise VariantError(f"There is no file {files[0]}.")
    return files[0]


def _from_gguf(path: Path) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise VariantError(f"{path} needs the package gguf: pip install 'trl-variants[demo]'.") from error
    with contextlib.redirect_stderr(io.StringIO()):  # the progress bar of this reader has no switch
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, padding_side="left")
        model = _causal_lm(str(path.parent), gguf_file=path.name)
    # The weights are ordinary float32 tensors by now, but the model still says that it is quantized, and such a
    # model can be neither trained nor saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.architectures = [type(model).__name__]
    return model, tokenizer


def _causal_lm(name: str, **options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)


def has_bf16(cpu: bool) -> bool:
    """Whether the processor computes in bfloat16 itself; where it does not, that is many times slower than float32."""
    import torch

    if not cpu:
        return bool(torch.cuda.is_bf16_supported())
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
