"""One forward of a model over the rows of a micro-batch, and the states from which its tokens are predicted.

TRL lays prompts out padded on the left and completions on the right, scores every position, and computes a prompt once
for every completion. Here a row is its prompt and its completion without a gap, padded on the right; only tokens that
count are scored; rows without one are left out; and where the plan says so each distinct prompt runs once, with its
key-value cache kept in the autograd graph and expanded to its completions.

The model is called once, through whatever wraps it, and TRL's fused head scores the states: what changes is the forward
of the backbone inside, while the call lasts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

__all__ = ["RowForward", "backbone_of", "row_states"]

_IGNORED = -100


def backbone_of(policy: Any) -> nn.Module:
    """The transformer below the language-model head, with its adapters."""
    model = policy.get_base_model() if hasattr(policy, "peft_config") else policy
    backbone: nn.Module = model.base_model
    return backbone


@dataclass(frozen=True)
class RowForward:
    """The rows of a micro-batch as a model computes them.

    Token t of a row is predicted from the state after its prompt and its t earlier tokens.

    Attributes:
        ids: (R, L) tokens of the rows that are computed: prompt and completion, padded on the right.
        mask: (R, L).
        prompts: (R,) tokens of each prompt.
        rows: (n,) which of the R rows each scored token belongs to.
        places: (n,) its number t inside the completion; ``completions`` of a row for the state after its last token.
        labels: (n,) the token; -100 where only the state is wanted.
        into: (n,) where in a flat (B, T) each goes; B * T for a state after the last token.
        shape: (B, T) of the micro-batch.
        shared: Whether each distinct prompt is computed once.
        pad_to: Widths are rounded up to a multiple of this.
    """

    ids: Tensor
    mask: Tensor
    prompts: Tensor
    rows: Tensor
    places: Tensor
    labels: Tensor
    into: Tensor
    shape: tuple[int, int]
    shared: bool = False
    pad_to: int = 1

    @classmethod
    def of(
        cls,
        inputs: dict[str, Tensor],
        *,
        shared: bool = False,
        every_row: bool = False,
        last: bool = False,
        pad_to: int | None = None,
    ) -> RowForward:
        """Lay out a micro-batch.

        Args:
            inputs: TRL's tensors: prompt_ids and completion_ids with their masks, and loss_mask where it is known.
            shared: Whether each distinct prompt is computed once.
            every_row: Whether to compute rows without a token that counts too.
            last: Whether the states after the last tokens are wanted: one a row, after all others.
            pad_to: Widths are rounded up to a multiple of this.
        """
        prompt_mask, completion_mask = inputs["prompt_mask"].bool(), inputs["completion_mask"].bool()
        # An empty prompt predicts its first token from one token of padding.
        prompt_mask = torch.cat([prompt_mask[:, :-1], prompt_mask[:, -1:] | ~prompt_mask.any(1, keepdim=True)], dim=1)
        count = inputs.get("loss_mask", completion_mask).bool() & completion_mask
        device, (batch, width) = count.device, count.shape
        used = torch.ones(batch, dtype=torch.bool, device=device) if every_row or last else count.any(1)
        if not used.any():  # a wrapper that reduces gradients wants one forward on every rank
            used = used.clone()
            used[completion_mask.sum(1).argmin()] = True
        chosen = used.nonzero()[:, 0]
        ids, mask = _aligned(
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)[chosen],
            torch.cat([prompt_mask, completion_mask], dim=1)[chosen],
            pad_to or 1,
        )
        rows, places = count[chosen].nonzero().unbind(1)
        labels = inputs["completion_ids"][chosen][rows, places]
        into = chosen[rows] * width + places
        if last:
            every = torch.arange(len(chosen), device=device)
            rows, places = torch.cat([rows, every]), torch.cat([places, completion_mask[chosen].sum(1)])
            labels = torch.cat([labels, labels.new_full((len(chosen),), _IGNORED)])
            into = torch.cat([into, into.new_full((len(chosen),), batch * width)])
        if not len(rows):  # nothing counts: one state, so that the result hangs on the model
            rows = places = torch.zeros(1, dtype=torch.long, device=device)
            labels, into = torch.full((1,), _IGNORED, device=device), torch.full((1,), batch * width, device=device)
        return cls(
            ids=ids,
            mask=mask,
            prompts=prompt_mask[chosen].sum(1),
            rows=rows,
            places=places,
            labels=labels,
            into=into,
            shape=(batch, width),
            shared=shared,
            pad_to=pad_to or 1,
        )

    def scatter(self, values: Tensor) -> Tensor:
        """(n,) or (1, n) values of the scored tokens as (B, T), 0 elsewhere."""
        flat = values.new_zeros(self.shape[0] * self.shape[1] + 1).index_put((self.into,), values.reshape(-1))
        return flat[:-1].view(self.shape)

    def last(self, values: Tensor) -> Tensor:
        """(B,) of the values after the last tokens, which ``of(last=True)`` put at the end."""
        return values.reshape(-1)[-self.shape[0] :]

    @property
    def tokens(self) -> int:
        """Tokens that are computed, padding included."""
        if not self.shared:
            return self.ids.numel()
        return self._distinct_prompts[0].numel() + self._completions[0].numel()

    @property
    def useful_tokens(self) -> int:
        """Those of them that are no padding."""
        if not self.shared:
            return int(self.mask.sum())
        return int(self._distinct_prompts[1].sum() + self._completions[1].sum())

    def states(self, forward: Any, **options: Any) -> Any:
        """Run a backbone's forward, and return its output with (1, n, H) states in place of its own."""
        return self._shared(forward, **options) if self.shared else self._plain(forward, **options)

    def _plain(self, forward: Any, **options: Any) -> Any:
        # What stands on a token's right does not reach it, so that no mask is needed but for what counts tokens.
        mask = self.mask if options.get("output_router_logits") else None
        output = forward(input_ids=self.ids, attention_mask=mask, use_cache=False, **options)
        columns = self.prompts[self.rows] - 1 + self.places
        output.last_hidden_state = output.last_hidden_state[self.rows, columns][None]
        return output

    def _shared(self, forward: Any, **options: Any) -> Any:
        prompts, prompt_mask, of_row = self._distinct_prompts
        cache = DynamicCache()
        keyword = _cache_keyword(forward)
        width, device = prompts.shape[1], prompts.device
        places = (prompt_mask.cumsum(1) - 1).clamp(min=0)
        first = forward(
            input_ids=prompts,
            attention_mask=prompt_mask.long(),
            position_ids=places,
            use_cache=True,
            **{keyword: cache},
            **options,
        )
        completions, completion_mask = self._completions
        expanded = DynamicCache([(layer.keys[of_row], layer.values[of_row]) for layer in cache.layers])
        output = forward(
            input_ids=completions,
            attention_mask=torch.cat([prompt_mask[of_row], completion_mask], dim=1).long(),
            position_ids=self.prompts[:, None] + torch.arange(completions.shape[1], device=device)[None],
            use_cache=True,
            **{keyword: expanded},
            **options,
        )
        after_prompt = first.last_hidden_state[of_row, width - 1 :]
        states = torch.cat([after_prompt, output.last_hidden_state], dim=1)
        output.last_hidden_state = states[self.rows, self.places][None]
        return output

    @cached_property
    def _distinct_prompts(self) -> tuple[Tensor, Tensor, Tensor]:
        """(U, P) distinct prompts padded on the left, their mask, and (R,) which of them each row has."""
        width = _rounded(int(self.prompts.max()), self.pad_to)
        columns = torch.arange(width, device=self.ids.device)[None] + self.prompts[:, None] - width
        mask = columns >= 0
        ids = self.ids.gather(1, columns.clamp(min=0)).masked_fill(~mask, -1)
        distinct, of_row = torch.unique(ids, dim=0, return_inverse=True)
        mask = distinct >= 0
        return distinct.clamp(min=0), mask, of_row

    @cached_property
    def _completions(self) -> tuple[Tensor, Tensor]:
        """(R, T) completions padded on the right, and their mask."""
        lengths = self.mask.sum(1) - self.prompts
        columns = torch.arange(_rounded(int(lengths.max()), self.pad_to), device=self.ids.device)[None]
        source = (columns + self.prompts[:, None]).clamp(max=self.ids.shape[1] - 1)
        return self.ids.gather(1, source), columns < lengths[:, None]


@contextmanager
def row_states(backbone: nn.Module, layout: RowForward) -> Iterator[None]:
    """While the context lasts, the backbone's forward runs the layout and gives its states; nothing stays behind."""
    own = backbone.__dict__.get("forward")
    original = backbone.forward

    def forward(*_: Any, **options: Any) -> Any:
        for name in ("input_ids", "attention_mask", "use_cache", "position_ids", "past_key_values", "cache"):
            options.pop(name, None)
        return layout.states(original, **options)

    backbone.forward = forward
    try:
        yield
    finally:
        if own is None:
            del backbone.forward
        else:
            backbone.forward = own


def _aligned(ids: Tensor, mask: Tensor, pad_to: int) -> tuple[Tensor, Tensor]:
    """Move each row's tokens, which are contiguous, to the left, and cut what no row needs."""
    lengths, start = mask.sum(1), mask.int().argmax(1)
    columns = torch.arange(_rounded(int(lengths.max()), pad_to), device=ids.device)[None]
    source = (columns + start[:, None]).clamp(max=ids.shape[1] - 1)
    return ids.gather(1, source), columns < lengths[:, None]


def _cache_keyword(forward: Any) -> str:
    """What a backbone calls its cache: transformers renames it."""
    function = forward.forward if isinstance(forward, nn.Module) else forward
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def _rounded(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple
