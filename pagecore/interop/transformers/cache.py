"""PagedCache: what `model.generate(past_key_values=...)` takes."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from collections.abc import Sequence as Listed
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pagecore.arrays.refusals import brief
from pagecore.cache import PagedKVCache
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.interop.transformers.attention import StoredKeys, mark_stored
from pagecore.interop.transformers.forward_hooks import register_hooks
from pagecore.interop.transformers.generation import Generation
from pagecore.interop.transformers.implementation import check_implementation
from pagecore.interop.transformers.inputs import read_ids, read_integers, read_mask
from pagecore.interop.transformers.layer import PagedLayer
from pagecore.interop.transformers.specs import keys_depend_on_length, specs_of_model
from pagecore.interop.transformers.tracing import untraced
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
        What each layer stores; by default what the model's config says, in the model's dtype.
    block_size, num_blocks, memory, max_sequences, prefix_cache, ... :
        As `PagedKVCache` has them; the device is the model's.

    Attributes
    ----------
    kv : PagedKVCache
        What holds the blocks; `cache.kv.stats()` says how full it is. What the last forward pass brought counts there
        once the next begins, or `reset`.

    Raises
    ------
    UnsupportedOption
        A model with another attention implementation, with an encoder, with layers that are no attention, or one whose
        config does not say what they store; then give `layers`. A prefix cache for a model whose keys depend on the
        length of the text.
    As `PagedKVCache`.

    Notes
    -----
    The model must run without gradients, as `generate` does. Padding may stand anywhere in a row. What prompts reuse is
    found by token ids: where a model takes more than ids (embeddings, images), or positions that do not count tokens,
    nothing is kept for others. Ids, mask and positions are read on the host in each forward pass.

    Examples
    --------
    >>> model.set_attn_implementation("pagecore")                            # doctest: +SKIP
    >>> cache = PagedCache(model, num_blocks=256)                            # doctest: +SKIP
    >>> model.generate(ids, past_key_values=cache, num_beams=4)              # doctest: +SKIP
    """

    def __init__(
        self, model: PreTrainedModel, *, layers: Listed[Spec] | None = None, block_size: int = 16, **options: Any
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedOption(
                f"model is a {type(model).__name__}; give the PreTrainedModel that it wraps, such as get_base_model()"
            )
        config = model.config.get_text_config(decoder=True)
        if config.is_encoder_decoder or model.config.is_encoder_decoder:
            raise UnsupportedOption(f"the {type(model).__name__} has an encoder; a PagedCache serves decoders alone")
        check_implementation(model)
        if layers is None:
            layers = specs_of_model(config, str(model.dtype).removeprefix("torch."))
        if not isinstance(layers, list | tuple):
            raise UnsupportedOption(
                f"layers is a {type(layers).__name__}; it must be a list with a spec for each layer"
            )
        if len(layers) != config.num_hidden_layers:
            raise ShapeError(f"layers has {len(layers)} specs; the model has {config.num_hidden_layers} layers")
        if keys_depend_on_length(config):
            if options.get("prefix_cache"):
                raise UnsupportedOption(
                    "prefix_cache is True; the model's rotary embedding depends on the length of the text, so that no "
                    "other text can reuse its keys: leave prefix_cache out"
                )
            options["prefix_cache"] = False
        device = "cpu" if model.device.type == "cpu" else str(model.device)
        self.kv = PagedKVCache(list(layers), block_size=block_size, device=device, **options)
        self._generation = Generation(self.kv, model)
        windows = [spec.window for spec in layers]
        super().__init__(layers=[PagedLayer(self, index, windows) for index in range(len(layers))])
        register_hooks(model, self, self._generation)

    # -- what a generation begins with ---------------------------------------------------------------------------

    def begin(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, namespace: Hashable = None
    ) -> int:
        """Leave the last generation behind, and begin one with what the prefix cache has of these prompts.

        Then ``generate(input_ids, attention_mask=..., past_key_values=cache)`` computes only the rest, and refuses
        other prompts. `num_beams` and `num_return_sequences` repeat the rows.

        Without it, ``generate`` compares its prompts with the ids that the cache holds. Prompts that begin with all of
        them go on where the last generation ended; others begin anew, in the same namespace, as if this had been
        called. Columns that came as embeddings have no ids to compare: longer prompts go on from them. A direct call of
        the model always goes on, as with every cache of transformers.

        Parameters
        ----------
        input_ids : Tensor, integers [batch, columns]
        attention_mask : Tensor, [batch, columns], optional
            0 where a column is padding.
        namespace : hashable, optional
            Prompts of different namespaces share nothing: name what else the keys depend on, such as the adapter that
            the model runs with. After the weights have changed, call `clear_prefix_cache`.

        Returns
        -------
        int
            Columns that need not be computed: as many as there are for every row, and never the last.

        Raises
        ------
        ShapeError, UnsupportedDtype, UnsupportedOption, OutOfRows
            Ids, a mask or a number of rows that do not fit.
        """
        ids = read_ids(input_ids)
        is_token = read_mask(attention_mask, len(ids), ids.shape[1], "as input_ids is")
        return self._generation.begin(ids, is_token, namespace)

    def reset(self) -> None:
        """Let all rows and their namespace go; what they computed stays in the prefix cache until blocks run short."""
        self._generation.reset()

    def clear_prefix_cache(self) -> int:
        """Let all rows go, and forget what was computed: after the weights have changed, say.

        Returns
        -------
        int
            Blocks that the prefix cache gave back.
        """
        self.reset()
        return self.kv.clear_prefix_cache()

    # -- what transformers asks ----------------------------------------------------------------------------------

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values; they are returned as they are, with word of where they went.

        Raises
        ------
        UnsupportedOption
            Another model runs with this cache than the one that it was made for, or gradients are recorded.
        ShapeError, UnsupportedDtype, DeviceError
            Keys and values that do not fit what the cache stores for the layer.
        """
        forward = self._generation.running_pass
        forward.store(layer_idx, key_states, value_states)
        mark_stored(key_states, value_states, StoredKeys(forward, layer_idx))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Columns that are computed, padding among them."""
        return self._generation.num_columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Columns before those of the forward pass."""
        return self.get_seq_length(layer_idx)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """-1: a row grows until blocks are short."""
        return -1

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each row become what row beam_idx[i] was; blocks are shared, not copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order; one that is named twice becomes two that share their blocks.

        Raises
        ------
        UnsupportedDtype
            No torch tensor of integers.
        ShapeError
            A row that the cache does not have.
        OutOfRows
            More rows than it can have.
        """
        rows = read_integers(indices, "indices", "[rows]").reshape(-1).tolist()
        self._generation.select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each row become `repeats` rows that share its blocks.

        Raises
        ------
        ShapeError
            `repeats` is below 1.
        OutOfRows
            More rows than the cache can have.
        """
        self._generation.repeat(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns; a positive number is the length to keep, which older
        transformers pass.

        Raises
        ------
        ShapeError
            There are not so many columns.
        UnsupportedOption
            A sliding window has given back keys that would be seen again: more was cropped than the last pass brought.
        """
        try:
            number = operator.index(tokens_to_remove)
        except Exception:
            raise UnsupportedOption(
                f"tokens_to_remove is {brief(tokens_to_remove)}; it must be an integer: minus the columns to remove"
            ) from None
        count = -number if number <= 0 else max(0, self.get_seq_length() - number)
        self._generation.crop(count)

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

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles: blocks are shared by beginning with them."""
        raise UnsupportedOption(
            "a PagedCache cannot be copied or pickled; to reuse what it has computed call cache.begin(input_ids)"
        )
