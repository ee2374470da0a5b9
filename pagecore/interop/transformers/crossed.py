"""PagedEncoderDecoderCache, the cache of models with an encoder (Whisper, T5, BART)."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from pagecore.cache import PagedKVCache
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.interop.transformers.cache import PagedCache
from pagecore.interop.transformers.implementation import check_implementation, device_of
from pagecore.interop.transformers.layers.attention import StoredKeys, mark_stored
from pagecore.interop.transformers.layers.layer import PagedLayer
from pagecore.interop.transformers.layers.specs import StorageOptions, refuse_stored
from pagecore.interop.transformers.passes.columns import ColumnCounts
from pagecore.interop.transformers.passes.forward import Forward
from pagecore.interop.transformers.passes.generation import Generation
from pagecore.interop.transformers.passes.hooks import register_hooks
from pagecore.interop.transformers.tracing import untraced
from pagecore.models import specs_from_config
from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS
from pagecore.storage import AttentionSpec, CrossSpec
from pagecore.storage.specs.rotation import is_rotated

_READ = (*ENCODER_DECODERS, "encoder-decoder", "seamless_m4t", "seamless_m4t_v2", "vision-encoder-decoder")


class PagedEncoderDecoderCache(EncoderDecoderCache):  # type: ignore[misc]
    """The paged key-value cache of a transformers model with an encoder: Whisper, T5 and BART.

    The encoder's keys and values take their blocks once. Beams, several answers and equal inputs share them, and so do
    rows that are reordered. Encoder padding takes no blocks. Each call of `generate` begins a new generation.

    Parameters
    ----------
    model : PreTrainedModel
        A model with attention implementation "pagecore": ``model.set_attn_implementation("pagecore")``. The cache
        registers hooks on the model, which are removed with the cache.
    layers : list of AttentionSpec and CrossSpec, optional
        The spec of each layer's self-attention, and then the `CrossSpec` of each layer; read from the config of a
        Whisper, T5, BART, SeamlessM4T or a model made of two others by default, in the model's dtype.
    format : str, optional
        Quantised format of the stored keys and values, as for `AttentionSpec`. Pass either `format` or `layers`. A T5
        serves none: its self-attention reads the keys outside of the kernels, to add a bias for the relative position.
    value_format : str, optional
        Format of the stored values, if it is another than that of keys.
    key_rotation, value_rotation : {"hadamard"}, optional
        Rotations of keys and values that have a format, as for `AttentionSpec`.
    block_size : int, optional
    num_blocks, memory, max_sequences, ... :
        Passed to `PagedKVCache`; the device is the model's.

    Attributes
    ----------
    kv : PagedKVCache
        Owns the blocks; layer ``i`` is the self-attention of the decoder's layer i, and layer ``num_layers + i`` its
        cross attention.

    Raises
    ------
    UnsupportedOption
        A model without an encoder, of another family (pass `layers`), or with another attention implementation.
    PagecoreError
        As `PagedKVCache`.

    Notes
    -----
    The model must run without gradients, as `generate` does. Equal encoder outputs are found by a digest of the hidden
    states, which the first pass of a generation computes on the host.

    Examples
    --------
    >>> model.set_attn_implementation("pagecore")                            # doctest: +SKIP
    >>> cache = PagedEncoderDecoderCache(model, num_blocks=512)              # doctest: +SKIP
    >>> model.generate(features, cache=cache, num_beams=4)         # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layers: Listed[AttentionSpec] | None = None,
        format: str | None = None,
        value_format: str | None = None,
        key_rotation: str | None = None,
        value_rotation: str | None = None,
        block_size: int | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedOption(f"model is a {type(model).__name__}; expected a PreTrainedModel")
        if not model.config.is_encoder_decoder:
            raise UnsupportedOption(f"the {type(model).__name__} has no encoder; use a PagedCache")
        check_implementation(model)
        specs = _specs(model, layers, StorageOptions(format, value_format, key_rotation, value_rotation))
        self.kv = PagedKVCache(specs, block_size=block_size, device=device_of(model, options), **options)
        self._generation = Generation(self.kv, model, has_encoder=True)
        count = len(specs) // 2
        biased = getattr(model.config, "relative_attention_num_buckets", None) is not None
        super().__init__(
            DecoderCache(self._generation, specs[:count], biased=biased), EncoderCache(self._generation, specs[count:])
        )
        self.is_updated = WrittenLayers(self._generation, count)
        register_hooks(model, self, self._generation)

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return the number of columns before those of the forward pass."""
        return self._generation.num_columns

    reset = PagedCache.reset
    reorder_cache = PagedCache.reorder_cache
    batch_select_indices = PagedCache.batch_select_indices
    batch_repeat_interleave = PagedCache.batch_repeat_interleave
    crop = PagedCache.crop
    activate_past_recording = PagedCache.activate_past_recording
    __reduce_ex__ = PagedCache.__reduce_ex__


class WrittenLayers(dict[int, bool]):
    """The map `EncoderDecoderCache.is_updated`: True if the running pass finds the encoder's keys in the cache.

    It has an entry for each layer, and all are True between passes: `generate` of a T5Gemma replaces the encoder's side
    of a cache otherwise.
    """

    def __init__(self, generation: Generation, count: int) -> None:
        super().__init__()
        self._generation = generation
        self._count = count

    def __len__(self) -> int:
        return self._count

    def get(self, layer: int, default: Any = None) -> bool:  # noqa: ARG002
        """Return True if no row of the running pass writes encoder tokens."""
        return not self._generation.is_running or self._generation.running_pass.finds_encoder

    __getitem__ = get


class DecoderCache(ColumnCounts, Cache):  # type: ignore[misc]
    """The self-attention side of a `PagedEncoderDecoderCache`."""

    def __init__(self, generation: Generation, specs: Listed[AttentionSpec], *, biased: bool) -> None:
        self._generation = generation
        self._biased = biased
        limits = [spec.window for spec in specs]
        super().__init__(layers=[PagedLayer(self, index, limit, limits) for index, limit in enumerate(limits)])

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values of a layer; return tensors that are marked as stored.

        A model with a bias for the relative position reads the number of columns from their shape.
        """
        forward = self._generation.running_pass
        forward.store(layer_idx, key_states, value_states)
        if self._biased:
            columns = self._generation.num_columns + forward.num_columns
            shape = -1, -1, columns, -1
            key_states, value_states = (each[:, :, :1].expand(shape) for each in (key_states, value_states))
        mark_stored(key_states, value_states, StoredKeys(forward, layer_idx, takes_bias=self._biased))
        return key_states, value_states

    @property
    def is_croppable(self) -> bool:
        """True: the columns of the last pass can always be removed."""
        return True


class EncoderCache(Cache):  # type: ignore[misc]
    """The cross-attention side of a `PagedEncoderDecoderCache`."""

    def __init__(self, generation: Generation, specs: Listed[AttentionSpec]) -> None:
        self._generation = generation
        first = len(specs)
        super().__init__(layers=[EncoderLayer(generation, first + index, spec) for index, spec in enumerate(specs)])

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the encoder's keys and values of a layer; return the same tensors, marked as stored."""
        forward = self._generation.running_pass
        layer = len(self.layers) + layer_idx
        forward.store_encoder(layer, key_states, value_states)
        mark_stored(key_states, value_states, StoredKeys(forward, layer, is_cross=True))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return the number of encoder columns of the running or last pass; 0 before the first."""
        return self._generation.encoder_columns


class EncoderLayer(CacheLayerMixin):  # type: ignore[misc]
    """One cross-attention layer, whose keys and values refer to those in the cache."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, generation: Generation, layer: int, spec: AttentionSpec) -> None:
        self._generation = generation
        self._layer = layer
        self._heads = spec.num_kv_heads
        self._last: tuple[Forward, torch.Tensor] | None = None  # the pass, and its stored keys
        self.is_initialized = True

    @property
    def keys(self) -> torch.Tensor:
        """A tensor of the shape of the encoder's keys, without their numbers, marked as stored."""
        return self._stored()

    @property
    def values(self) -> torch.Tensor:
        """A tensor of the shape of the encoder's values, without their numbers, marked as stored."""
        return self._stored()

    def _stored(self) -> torch.Tensor:
        forward = self._generation.running_pass
        if self._last is None or self._last[0] is not forward:
            states = self._generation.encoder_states
            placeholder = states.new_zeros(1).expand(len(states), self._heads, states.shape[1], 1)
            mark_stored(placeholder, placeholder, StoredKeys(forward, self._layer, is_cross=True))
            self._last = forward, placeholder
        return self._last[1]

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: blocks are allocated when the cache is made."""

    def update(self, *_: Any, **__: Any) -> Any:
        """Raise UnsupportedOption: the cache stores the encoder's keys."""
        raise UnsupportedOption("an encoder layer was updated by itself; call cross_attention_cache.update")

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:  # noqa: ARG002
        """Return the number of encoder columns, and the offset 0."""
        return self._generation.encoder_columns, 0

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of encoder columns."""
        return self._generation.encoder_columns

    def get_max_length(self) -> int:
        """Return -1: the number of encoder tokens is only limited by the specs."""
        return -1

    get_max_cache_shape = get_max_length


def _specs(model: PreTrainedModel, layers: Listed[AttentionSpec] | None, stored: StorageOptions) -> list[AttentionSpec]:
    """Return the specs of the self-attention of each layer, then those of its cross attention."""
    if layers is None:
        config = model.config
        if config.model_type not in _READ:
            raise UnsupportedOption(
                f"model_type is {config.model_type!r}; expected one of {', '.join(_READ)}: for another "
                "model pass layers=[AttentionSpec(...), ..., CrossSpec(...), ...]"
            )
        dtype = str(model.dtype).removeprefix("torch.")
        specs: list[Any] = specs_from_config(config.to_dict(), dtype=dtype, **stored._asdict())
    else:
        refuse_stored(stored)
        if not isinstance(layers, list | tuple):
            raise UnsupportedOption(
                f"layers is a {type(layers).__name__}; expected a list with two specs for each layer"
            )
        specs = list(layers)
    count = len(specs) // 2
    crossed = [isinstance(spec, CrossSpec) for spec in specs]
    if not count or crossed != [False] * count + [True] * count:
        raise ShapeError(
            f"layers has {len(specs)} specs; expected one for the self-attention of each layer, and then a CrossSpec "
            "for each"
        )
    if getattr(model.config, "relative_attention_num_buckets", None) is not None and any(
        spec.format is not None or spec.value_format is not None or is_rotated(spec) for spec in specs[:count]
    ):
        raise UnsupportedOption(
            f"a format or rotation is given, but the {type(model).__name__} adds a bias to the scores of its "
            "self-attention, which reads the stored keys as they are; give them to the CrossSpec layers only"
        )
    return specs
