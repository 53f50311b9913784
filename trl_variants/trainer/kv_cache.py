"""A key-value cache for generation that has room for further tokens.

`DynamicLayer` appends by copying all that it holds, at every token: with long prompts, most of what decoding costs on a
CPU. A `RoomyLayer` writes into storage that it grows by an eighth at a time, and hands out a view of its filled part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

__all__ = ["RoomyLayer", "repeat_rows"]


class RoomyLayer(DynamicLayer):
    """One layer's keys and values, (B, heads, length, size), as views of larger storage.

    Args:
        keys: What it starts with.
        values: The same.
    """

    _layer_type = None  # not what transformers should make for a kind of layer

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._storage: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return all: (B, heads, length + new, size)."""
        if not self.is_initialized:  # after reset()
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = self._appended("keys", self.keys, key_states)
        self.values = self._appended("values", self.values, value_states)
        return self.keys, self.values

    def _appended(self, name: str, held: Tensor, new: Tensor) -> Tensor:
        length, end = held.shape[-2], held.shape[-2] + new.shape[-2]
        storage, dtype = self._storage.get(name), torch.promote_types(held.dtype, new.dtype)
        # Rows that were selected, reordered or repeated since are elsewhere; those that were cropped still begin here.
        if (
            storage is None
            or storage.data_ptr() != held.data_ptr()
            or storage.shape[-2] < end
            or storage.dtype != dtype
        ):
            shape = (*held.shape[:-2], end + max(32, end // 8), held.shape[-1])
            storage = self._storage[name] = held.new_empty(shape, dtype=dtype)
            storage[..., :length, :] = held
        storage[..., length:end, :] = new
        return storage[..., :end, :]


def repeat_rows(cache: Cache, rows: Tensor) -> None:
    """Replace a cache's rows by copies of them, with room for what follows; in place, one layer at a time.

    Args:
        cache: Its layers are plain `DynamicLayer`s.
        rows: (B,), for each new row the old one that it equals.
    """
    for index, layer in enumerate(cache.layers):
        here = rows.to(layer.keys.device)
        cache.layers[index] = RoomyLayer(layer.keys.index_select(0, here), layer.values.index_select(0, here))
