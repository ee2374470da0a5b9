"""PagedCache, the argument of ``model.generate(cache=...)``."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Listed
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pagecore.cache import PagedKVCache
from pagecore.errors import UnsupportedOption, shown
from pagecore.interop.torch import as_torch
from pagecore.interop.transformers.implementation import check_implementation, device_of
from pagecore.interop.transformers.inputs.arguments import read_count, read_ids, read_integers, read_mask
from pagecore.interop.transformers.layers.attention import StoredKeys, mark_stored
from pagecore.interop.transformers.layers.latents import pass_latents_on
from pagecore.interop.transformers.layers.layer import PagedLayer
from pagecore.interop.transformers.layers.model_layers import read_layers
from pagecore.interop.transformers.layers.specs import StorageOptions, keys_depend_on_length
from pagecore.interop.transformers.passes.columns import ColumnCounts
from pagecore.interop.transformers.passes.generation import Generation
from pagecore.interop.transformers.passes.hooks import register_hooks
from pagecore.interop.transformers.states.layers import StateTensors
from pagecore.interop.transformers.states.mixers import call_in_segments
from pagecore.interop.transformers.states.running import RunningStates
from pagecore.interop.transformers.states.specs import SCANS_WITHOUT_STATE
from pagecore.interop.transformers.tracing import untraced
from pagecore.storage import Spec


class PagedCache(ColumnCounts, Cache):  # type: ignore[misc]
    """The paged key-value cache of a transformers model.

    Rows of a batch with equal beginnings share their blocks (beams, several answers to one prompt, equal prompts).
    Padding takes no blocks. A later `generate` can reuse the prefix that an earlier one computed; see `begin`.

    In a hybrid model (Qwen3-Next, LFM2, Falcon-H1, Bamba, Jamba, Zamba 2, Granite 4, Nemotron-H) each recurrent layer
    has the states of all rows in tensors ``[rows, *shape]``, which the model updates in place. Copies of them are kept
    as checkpoints in slots of `kv`; a prefix is reused up to its deepest checkpoint. Models without attention (Mamba,
    Mamba 2, Falcon Mamba) have no blocks: leave `num_blocks` out. `generate` takes the cache as `cache`,
    `past_key_values` or `cache_params`, in every version of transformers.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder with attention implementation "pagecore": ``model.set_attn_implementation("pagecore")``. The cache
        registers hooks on the model, which are removed with the cache.
    layers : list of AttentionSpec or LatentSpec, optional
        Specs of the layers that attend; read from the model's config by default, in the model's dtype. Latent
        attention (DeepSeek) stores latents, or expanded keys and values if the model's code caches these (transformers
        before 5.15.1).
    format : str, optional
        Quantised format of the stored keys and values, as for `AttentionSpec`, such as "int8_token", or of latents, as
        for `LatentSpec`; by default they have the model's dtype. Pass either `format` or `layers`.
    value_format : str, optional
        Format of the stored values, if it is another than that of keys. Latents have none.
    key_rotation, value_rotation : {"hadamard"}, optional
        Rotations of keys and values that have a format, as for `AttentionSpec`. Latents have none.
    block_size : int, optional
    chunk, interval : int
        Tokens between two possible checkpoints of a hybrid model, as for `StateSpec`: in a prompt the last multiple of
        lcm(chunk, block_size) is kept, afterwards every `interval` tokens.
    checkpoint_format : {"int8"}, optional
        Format of the checkpoints of a hybrid model, as for `StateSpec`.
    num_blocks, memory, max_sequences, prefix_cache, num_states, ... :
        Passed to `PagedKVCache`; the device is the model's. A hybrid model with `num_blocks` gets two slots for each
        of `max_sequences` unless `num_states` is given.

    Attributes
    ----------
    kv : PagedKVCache
        Owns the blocks; `cache.kv.stats()` reports their use. The columns of the last forward pass are included once
        the next pass begins, or after `reset`.

    Raises
    ------
    UnsupportedOption
        The model has another attention implementation, an encoder, layers that store neither keys and values nor one
        state, states outside of its cache (MiniMax, RecurrentGemma, xLSTM), or a config that does not
        describe its layers (pass `layers`); or `prefix_cache` is True for a model whose keys depend on the length of
        the text.
    PagecoreError
        As `PagedKVCache` and `StateSpec`.

    Notes
    -----
    The model must run without gradients, as `generate` does. Padding may be anywhere in a row; in a hybrid model, only
    before its tokens. Prefixes are matched by token ids: a pass with other inputs (embeddings, images), or with
    positions that do not count tokens, publishes nothing to the prefix cache. Each forward pass reads ids, mask and
    positions on the host.

    Examples
    --------
    >>> model.set_attn_implementation("pagecore")                            # doctest: +SKIP
    >>> cache = PagedCache(model, num_blocks=256)                            # doctest: +SKIP
    >>> model.generate(ids, cache=cache, num_beams=4)              # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layers: Listed[Spec] | None = None,
        format: str | None = None,
        value_format: str | None = None,
        key_rotation: str | None = None,
        value_rotation: str | None = None,
        block_size: int | None = None,
        chunk: int = 64,
        interval: int = 256,
        checkpoint_format: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedOption(
                f"model is a {type(model).__name__}; expected a PreTrainedModel: for a wrapper such as PEFT's, pass "
                "get_base_model()"
            )
        config = model.config.get_text_config(decoder=True)
        if config.is_encoder_decoder or model.config.is_encoder_decoder:
            raise UnsupportedOption(
                f"the {type(model).__name__} has an encoder; a PagedCache only serves decoders: use a "
                "PagedEncoderDecoderCache"
            )
        check_implementation(model)
        stored = StorageOptions(format, value_format, key_rotation, value_rotation)
        model_layers = read_layers(model, layers, stored, chunk, interval, checkpoint_format)
        if keys_depend_on_length(config):
            if options.get("prefix_cache"):
                raise UnsupportedOption(
                    "prefix_cache is True, but the model's rotary embedding depends on the length of the text, so "
                    "other prompts cannot reuse its keys; leave prefix_cache out"
                )
            options["prefix_cache"] = False
        self.kv = PagedKVCache(model_layers.specs, block_size=block_size, device=device_of(model, options), **options)
        super().__init__(layers=model_layers.views(self))
        for layer, place in model_layers.state_places.items():
            planes = self.kv.spec(place).planes
            self.layers[layer].planes = [as_torch(self.kv.plane(plane.name, place)) for plane in planes]
        states = RunningStates({layer: self.layers[layer] for layer in model_layers.states}, model.device)
        self._generation = Generation(self.kv, model, layers=model_layers.places, states=states)
        call_in_segments(model_layers.modules.values(), self, single=config.model_type in SCANS_WITHOUT_STATE)
        register_hooks(model, self, self._generation)
        pass_latents_on(model, self)

    # -- the start of a generation --------------------------------------------------------------------------------

    def begin(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, namespace: Hashable = None
    ) -> int:
        """End the last generation, and begin one with the prefixes of these prompts that are cached.

        The following ``generate(input_ids, attention_mask=..., cache=cache)`` only computes the other
        columns, and raises ShapeError for other prompts. `num_beams` and `num_return_sequences` repeat the rows.

        Without a call of `begin`, ``generate`` compares its prompts with the ids in the cache. Prompts that start with
        all of these ids continue the last generation; for other prompts `generate` calls `begin` in the same namespace.
        Columns that were computed from embeddings have no ids to compare: a longer prompt continues from them. A direct
        call of the model always continues the last generation, as with every cache of transformers.

        Parameters
        ----------
        input_ids : Tensor, integers [batch, columns]
        attention_mask : Tensor, [batch, columns], optional
            0 where a column is padding.
        namespace : hashable, optional
            Prompts of different namespaces share no blocks. Name everything else that the keys depend on, such as the
            adapter of the model. After a change of the weights, call `clear_prefix_cache`.

        Returns
        -------
        int
            Number of columns that are cached for every row. The last column is always computed.

        Raises
        ------
        ShapeError, UnsupportedDtype, UnsupportedOption
            `input_ids` or `attention_mask` has a wrong shape or dtype; or padding after tokens for a model with
            recurrent layers. The last generation then continues.
        OutOfRows
            More rows than `max_sequences`.
        """
        ids = read_ids(input_ids)
        is_token = read_mask(attention_mask, len(ids), ids.shape[1], "as input_ids is")
        return self._generation.begin(ids, is_token, namespace)

    def reset(self) -> None:
        """Remove all rows and forget their namespace. Their blocks stay in the prefix cache until they are evicted."""
        self._generation.reset()

    def clear_prefix_cache(self) -> int:
        """Remove all rows and empty the prefix cache, for example after a change of the weights.

        Returns
        -------
        int
            Number of blocks that the prefix cache has freed.
        """
        self.reset()
        return self.kv.clear_prefix_cache()

    # -- the interface of transformers' Cache ----------------------------------------------------------------------

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values of a layer, and return the same tensors, marked as stored.

        Parameters
        ----------
        key_states, value_states : Tensor, [batch, heads, columns, dim]
            With a `LatentSpec`, the latents and the rotated parts of one head.
        layer_idx : int

        Returns
        -------
        key_states, value_states : Tensor
            The arguments. An attribute on them refers the attention implementation to the paged keys.

        Raises
        ------
        UnsupportedOption
            A model other than that of the cache runs, or gradients are recorded.
        ShapeError, UnsupportedDtype, DeviceError
            Keys or values do not match the spec of the layer.
        """
        forward = self._generation.running_pass
        forward.store(layer_idx, key_states, value_states)
        mark_stored(key_states, value_states, StoredKeys(forward, layer_idx))
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the windows of the convolution of a recurrent layer, ``[rows, dim, kernel]``, in a forward pass.

        They alias the states of the cache; None before the first tokens.

        Raises
        ------
        UnsupportedOption
            A model other than that of the cache runs.
        """
        self._generation.running_pass.check_running()
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the states of a recurrent layer, ``[rows, *shape]``, in a forward pass; as `get_conv_state`."""
        self._generation.running_pass.check_running()
        return super().get_recurrent_state(layer_idx, state_idx)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace each row i by row ``beam_idx[i]``; blocks are shared, not copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in this order; a row that is listed twice becomes two rows that share its blocks.

        Raises
        ------
        UnsupportedDtype
            `indices` is not a torch tensor of integers.
        ShapeError
            The cache does not have one of the rows.
        OutOfRows
            More rows than `max_sequences`.
        """
        rows = read_integers(indices, "indices", "[rows]").reshape(-1).tolist()
        self._generation.select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each row by `repeats` rows that share its blocks.

        Raises
        ------
        ShapeError
            `repeats` is less than 1.
        OutOfRows
            More rows than `max_sequences`.
        """
        self._generation.repeat(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns.

        Parameters
        ----------
        tokens_to_remove : int
            Minus the number of columns. A positive number is the length to keep, which older versions of transformers
            pass.

        Raises
        ------
        ShapeError
            The cache has fewer columns.
        UnsupportedOption
            More columns than the last pass added, and a sliding-window layer has already freed keys that would be in
            the window again; or `tokens_to_remove` is not an integer. In a hybrid model, a row would end neither at its
            last checkpoint, which the message names, nor at 0 tokens.
        """
        number = read_count(tokens_to_remove)
        if number is None:
            raise UnsupportedOption(
                f"tokens_to_remove is {shown(tokens_to_remove)}; expected an integer, minus the number of columns"
            )
        count = -number if number <= 0 else max(0, self.get_seq_length() - number)
        self._generation.crop(count)

    def activate_past_recording(self) -> None:
        """Do nothing: the columns of a pass can be cropped anyway, until the next pass begins.

        Raises
        ------
        UnsupportedOption
            The model has recurrent layers, whose states cannot be taken back by a few tokens.
        """
        if not self.is_croppable:
            raise UnsupportedOption(
                "the model has recurrent layers, whose states a PagedCache cannot take back by a few tokens; generate "
                "without an assistant model and without prompt lookup"
            )

    @property
    def is_initialized(self) -> bool:
        """True: blocks are allocated when the cache is made."""
        return True

    @property
    def is_croppable(self) -> bool:
        """True if the columns of the last pass can be removed: the model has no recurrent layers."""
        return not any(isinstance(layer, StateTensors) for layer in self.layers)

    @property
    def is_linear(self) -> list[bool]:
        """True for each layer that has a state and does not attend."""
        return [isinstance(layer, StateTensors) and not isinstance(layer, PagedLayer) for layer in self.layers]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise UnsupportedOption: a cache cannot be copied or pickled."""
        raise UnsupportedOption(
            "a PagedCache cannot be copied or pickled; to reuse its cached prefixes call cache.begin(input_ids)"
        )
