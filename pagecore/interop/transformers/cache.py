"""PagedCache: what `model.generate(past_key_values=...)` takes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from pagecore.cache import PagedKVCache
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.interop.transformers import attention
from pagecore.interop.transformers.forward import Forward
from pagecore.interop.transformers.rows import Ids, Rows, read_mask
from pagecore.models import specs_from_config
from pagecore.storage import Spec


class PagedCache(Cache):  # type: ignore[misc]
    """The key-value cache of a transformers model, in blocks.

    Rows of the batch that begin alike share their blocks (beams, several answers to one prompt, equal prompts), padding
    takes none, and what one `generate` has computed another can begin with; see `begin`.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder with attention implementation "pagecore": ``model.set_attn_implementation("pagecore")``. A hook on it
        tells the cache of each forward pass that runs with this cache, for as long as the cache lives.
    layers : list of AttentionSpec, optional
        What each layer stores; by default what `specs_from_config` reads from the model's config, in its dtype.
    block_size, num_blocks, memory, max_sequences, prefix_cache, ... :
        As `PagedKVCache` has them.

    Attributes
    ----------
    kv : PagedKVCache
        What holds the blocks; `cache.kv.stats()` says how full it is.

    Raises
    ------
    UnsupportedOption
        A model with another attention implementation, or one whose config is not known; then give `layers`.
    As `PagedKVCache`.

    Notes
    -----
    The model must run without gradients, as `generate` does. Padding may stand anywhere in a row.

    Examples
    --------
    >>> model.set_attn_implementation("pagecore")                            # doctest: +SKIP
    >>> cache = PagedCache(model, num_blocks=256)                            # doctest: +SKIP
    >>> model.generate(ids, past_key_values=cache, num_beams=4)              # doctest: +SKIP
    """

    def __init__(
        self, model: PreTrainedModel, *, layers: Listed[Spec] | None = None, block_size: int = 16, **options: Any
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        name = config._attn_implementation
        if name != attention.NAME:
            raise UnsupportedOption(
                f'the model\'s attention implementation is {name!r}; call model.set_attn_implementation("pagecore")'
            )
        if layers is None:
            dtype = str(model.dtype).removeprefix("torch.")
            layers = specs_from_config(config.to_dict(), dtype=dtype)
        if len(layers) != config.num_hidden_layers:
            raise ShapeError(f"layers has {len(layers)} specs; the model has {config.num_hidden_layers} layers")
        device = "cpu" if model.device.type == "cpu" else str(model.device)
        self.kv = PagedKVCache(list(layers), block_size=block_size, device=device, **options)
        self._rows = Rows(self.kv)
        self._forward: Forward | None = None
        super().__init__(layers=[PagedLayer(self, i, spec.window) for i, spec in enumerate(layers)])
        _follow(model.base_model, self)

    # -- what a generation begins with ---------------------------------------------------------------------------

    def begin(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Leave the last generation behind, and begin one with what the prefix cache has of these prompts.

        Then ``generate(input_ids, attention_mask=..., past_key_values=cache)`` computes only the rest. Without it a
        generation goes on where the last one ended, as with every cache of transformers, and its `input_ids` start with
        all that the cache holds.

        Parameters
        ----------
        input_ids : Tensor, integers [batch, columns]
        attention_mask : Tensor, [batch, columns], optional
            0 where a column is padding.

        Returns
        -------
        int
            Columns that need not be computed: as many as there are for every row, and never the last.
        """
        ids = _read_ids(input_ids)
        is_token = read_mask(attention_mask, *ids.shape)
        if is_token.shape != ids.shape:
            raise ShapeError(f"attention_mask has {is_token.shape[1]} columns and input_ids {ids.shape[1]}")
        self.reset()
        return self._rows.begin(ids, is_token)

    def reset(self) -> None:
        """Let all rows go; what they have computed stays in the prefix cache until blocks are short."""
        self._settle()
        self._rows.clear()

    # -- what transformers asks ----------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values; they are returned as they are, with word of where they went."""
        if self._forward is None or self._forward.is_over:
            raise UnsupportedOption(
                "update was called outside of a forward pass of the cache's model; pass the cache to that model as "
                "past_key_values"
            )
        self._forward.store(layer_idx, key_states, value_states)
        setattr(key_states, attention.TICKET, (self._forward, layer_idx))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that are computed, padding among them."""
        return self._rows.num_columns + self._pending()

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Columns before those of the forward pass."""
        return self.get_seq_length(layer_idx)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: a row grows until blocks are short."""
        return -1

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each row become what row beam_idx[i] was; blocks are shared, not copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order; one that is named twice becomes two that share their blocks."""
        self._settle()
        self._rows.select(np.asarray(indices.cpu()).reshape(-1).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each row become `repeats` rows that share its blocks."""
        self._settle()
        self._rows.select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def crop(self, max_length: int) -> None:
        """Forget the last ``-max_length`` columns; a positive number is the length to keep, as in older versions.

        Raises
        ------
        UnsupportedOption
            A sliding window has given back keys that would be seen again: more was cropped than the last pass brought.
        """
        count = -max_length if max_length <= 0 else max(0, self.get_seq_length() - max_length)
        brought = self._pending()
        if count and brought >= count and self._forward is not None:
            self._forward.commit(brought - count)
            return
        self._settle()
        self._rows.crop(count)

    def activate_past_recording(self) -> None:
        """Nothing to do: a pass is only counted when the next one begins, so what it brought can be cropped."""

    @property
    def is_initialized(self) -> bool:
        """Always: the blocks are there from the start."""
        return True

    @property
    def is_croppable(self) -> bool:
        """Always, for what the last pass brought."""
        return True

    # -- a forward pass ------------------------------------------------------------------------------------------

    def _pending(self) -> int:
        """Columns that a forward pass has brought and that are not counted yet."""
        forward = self._forward
        return forward.is_token.shape[1] if forward is not None and forward.is_done else 0

    def _settle(self) -> None:
        """Count what the last forward pass brought."""
        if self._forward is not None:
            self._forward.commit()

    def _enter(self, inputs: Mapping[str, Any]) -> Forward:
        ids, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
        if ids is None and embeddings is None:
            raise UnsupportedOption("the forward pass has neither input_ids nor inputs_embeds; pass one by its name")
        self._settle()
        named = None if ids is None else _read_ids(ids)
        batch, columns = embeddings.shape[:2] if named is None else named.shape
        mask = inputs.get("attention_mask")
        is_token = read_mask(mask, batch, columns)
        rows = self._rows
        if len(rows) and len(rows) != batch and batch % len(rows) == 0:
            self.batch_repeat_interleave(batch // len(rows))
        if len(rows) not in (0, batch):
            raise ShapeError(
                f"the forward pass has {batch} rows and the cache {len(rows)}; reset() the cache, or begin()"
            )
        self._check_past(mask)
        previous = None if self._forward is None else self._forward.batch
        self._forward = Forward(rows, named, is_token, previous)
        return self._forward

    def _check_past(self, mask: torch.Tensor | None) -> None:
        past = self._rows.num_columns
        if mask is None or past == 0 or mask.shape[1] <= past:
            return
        given = mask[:, :past].detach().cpu().numpy() != 0
        if not np.array_equal(given, self._rows.is_token):
            raise UnsupportedOption(
                "attention_mask hides, or shows, other columns than when they were computed; a paged cache stores "
                "tokens alone: reset() it and compute them again"
            )


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of a `PagedCache`, for those who ask the layer and not the cache."""

    is_compileable = False
    is_croppable = True

    def __init__(self, cache: PagedCache, index: int, window: int | None) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self._index = index
        self.is_sliding = window is not None
        self.is_initialized = True

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing: the blocks are there from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """As `PagedCache.update`."""
        return self._whole.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Columns with those of the forward pass, and 0."""
        columns = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self._whole.get_seq_length() + columns, 0

    def get_seq_length(self, *_: Any) -> int:
        """As `PagedCache.get_seq_length`."""
        return self._whole.get_seq_length()

    def get_max_length(self) -> int:
        """-1: a row grows until blocks are short."""
        return -1

    get_max_cache_shape = get_max_length

    @property
    def _whole(self) -> PagedCache:
        cache = self._cache()
        if cache is None:
            raise UnsupportedOption(
                "the PagedCache that this layer belongs to is gone; keep it for as long as its layers"
            )
        return cache


def _read_ids(ids: torch.Tensor) -> Ids:
    if ids.ndim != 2:
        raise ShapeError(f"input_ids has shape {tuple(ids.shape)}; it must be [batch, columns]")
    read: Ids = ids.detach().cpu().numpy().astype(np.int64, copy=False)
    return read


def _follow(module: torch.nn.Module, cache: PagedCache) -> None:
    """Tell the cache of the module's forward passes, until it is gone."""
    reference = weakref.ref(cache)

    def enter(_: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        own = reference()
        if own is None or options.get("past_key_values") is not own:
            return
        inputs = {"input_ids": arguments[0], **options} if arguments else options
        attention.enter(own._enter(inputs))

    def leave(_: torch.nn.Module, __: Any, options: dict[str, Any], output: Any) -> None:
        own = reference()
        if own is None or options.get("past_key_values") is not own or own._forward is None:
            return
        attention.leave(own._forward)
        if output is None:
            own._forward.abandon()  # it raised
        else:
            own._forward.finish()

    hooks = [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True, always_call=True),
    ]
    for hook in hooks:
        weakref.finalize(cache, hook.remove)
