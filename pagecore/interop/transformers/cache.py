"""PagedCache: what `model.generate(past_key_values=...)` takes."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Listed
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from pagecore.arrays.refusals import brief
from pagecore.cache import PagedKVCache
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.interop.transformers.attention import NAME, REMEDY, Columns, StoredKeys, mark_stored
from pagecore.interop.transformers.forward import Forward
from pagecore.interop.transformers.forward_hooks import register_hooks
from pagecore.interop.transformers.inputs import Ids, Mask, read_ids, read_inputs, read_integers, read_mask
from pagecore.interop.transformers.prompts import as_attention_mask, read_prompt
from pagecore.interop.transformers.rows import Rows
from pagecore.interop.transformers.specs import specs_of_model
from pagecore.interop.transformers.tracing import untraced
from pagecore.storage import Spec

# Keys of these are turned by angles that depend on how long the text is by now: they serve no other text.
_LENGTH_DEPENDENT = {"dynamic", "longrope"}


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
        _check_implementation(model)
        if layers is None:
            layers = specs_of_model(config, str(model.dtype).removeprefix("torch."))
        if not isinstance(layers, list | tuple):
            raise UnsupportedOption(
                f"layers is a {type(layers).__name__}; it must be a list with a spec for each layer"
            )
        if len(layers) != config.num_hidden_layers:
            raise ShapeError(f"layers has {len(layers)} specs; the model has {config.num_hidden_layers} layers")
        if _depends_on_length(config):
            if options.get("prefix_cache"):
                raise UnsupportedOption(
                    "prefix_cache is True; the model's rotary embedding depends on the length of the text, so that no "
                    "other text can reuse its keys: leave prefix_cache out"
                )
            options["prefix_cache"] = False
        device = "cpu" if model.device.type == "cpu" else str(model.device)
        self.kv = PagedKVCache(list(layers), block_size=block_size, device=device, **options)
        self._rows = Rows(self.kv)
        self._forward: Forward | None = None
        self._model = weakref.ref(model)
        self._running: torch.nn.Module | None = None
        windows = [spec.window for spec in layers]
        super().__init__(layers=[PagedLayer(self, index, windows) for index in range(len(layers))])
        register_hooks(model, self)

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
        self.reset()
        return self._rows.begin(ids, is_token, namespace)

    def reset(self) -> None:
        """Let all rows and their namespace go; what they computed stays in the prefix cache until blocks run short."""
        self._settle()
        self._rows.clear()
        self._rows.namespace = None

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
        if self._forward is None or self._running is None:
            raise _not_its_model("update was called", self._model())
        self._forward.store(layer_idx, key_states, value_states)
        mark_stored(key_states, value_states, StoredKeys(self._forward, layer_idx))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Columns that are computed, padding among them."""
        return self._rows.num_columns + self._pending()

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
        self._settle()
        self._rows.select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each row become `repeats` rows that share its blocks.

        Raises
        ------
        ShapeError
            `repeats` is below 1.
        OutOfRows
            More rows than the cache can have.
        """
        self._settle()
        self._rows.repeat(repeats)

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
        pending = self._pending()
        if self._forward is not None and 0 < count <= pending:
            self._forward.commit(pending - count)
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

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles: blocks are shared by beginning with them."""
        raise UnsupportedOption(
            "a PagedCache cannot be copied or pickled; to reuse what it has computed call cache.begin(input_ids)"
        )

    # -- a call of generate --------------------------------------------------------------------------------------

    @untraced
    def _meet_prompt(
        self, model: PreTrainedModel, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> dict[str, Any]:
        """Begin anew unless the prompt of a call of ``model.generate`` continues the rows; returns its options."""
        self._settle()
        rows = self._rows
        prompt = read_prompt(model, arguments, options) if len(rows) else None
        if prompt is None or rows.num_columns == 0:
            return options
        if prompt.is_whole:
            rows.clear()
        elif prompt.ids is None or prompt.is_token is None:
            if not rows.is_begun and (prompt.columns <= rows.num_columns or prompt.num_rows != len(rows)):
                rows.clear()
        elif rows.is_begun:
            self._check_begun(prompt.ids, prompt.is_token)
        elif prompt.num_rows != len(rows) or rows.first_difference(prompt.ids, prompt.is_token) is not None:
            if prompt.is_reusable:
                rows.begin(prompt.ids, prompt.is_token, rows.namespace)
            else:
                rows.clear()
        if prompt.ids is not None and options.get("attention_mask") is None:
            options = options | {"attention_mask": as_attention_mask(prompt, model.get_input_embeddings().weight)}
        return options

    def _check_begun(self, ids: Ids, is_token: Mask) -> None:
        difference = self._rows.first_difference(ids, is_token)
        if difference is not None:
            row, column = difference
            raise ShapeError(
                f"input_ids is another prompt than the one that the cache began with: column {column} of row {row} "
                f"differs, of {self._rows.num_columns} that the prefix cache gave; begin() anew with these tokens"
            )

    # -- a forward pass ------------------------------------------------------------------------------------------

    def _enter(self, given: Mapping[str, Any], module: torch.nn.Module) -> None:
        """Make ready for a forward pass of `module`, the model or the decoder in it, with these arguments."""
        if self._running is not None and module is not self._running:
            return  # what runs has called it
        model = self._model()
        if model is None:
            raise _not_its_model(f"a {type(module).__name__} runs with a PagedCache", None)
        _check_implementation(model)
        self._settle()
        rows = self._rows
        inputs = read_inputs(given, rows.num_columns)
        if len(rows) and len(rows) != inputs.batch and (not rows.is_begun or inputs.batch % len(rows)):
            raise ShapeError(
                f"the forward pass has {inputs.batch} rows and the cache {len(rows)}; leave the generation with "
                "reset() or begin(), or repeat its rows with batch_repeat_interleave()"
            )
        if inputs.past is not None and len(rows) and (inputs.past != _repeated(rows.is_token, inputs.batch)).any():
            raise UnsupportedOption(
                "attention_mask hides, or shows, other columns than when they were computed; a paged cache stores "
                "tokens alone: reset() it and compute them again"
            )
        previous = None if self._forward is None else self._forward.batch
        self._forward = Forward(rows, inputs, model.device, previous)
        self._running = module

    def _leave(self, module: torch.nn.Module, has_failed: bool) -> None:
        """The forward pass of `module` is through, or has raised; also where it could not be entered."""
        if module is not self._running:
            return
        self._running, forward = None, self._forward
        assert forward is not None
        if has_failed:
            forward.abandon()
        else:
            forward.finish()

    def _pending(self) -> int:
        """Columns that a forward pass has brought and that are not counted yet."""
        return self._forward.num_columns if self._forward is not None and self._forward.is_done else 0

    def _settle(self) -> None:
        """Count what the last forward pass brought."""
        if self._forward is not None:
            self._forward.commit()


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of a `PagedCache`, for those who ask the layer and not the cache."""

    is_compileable = False
    is_croppable = True

    def __init__(self, cache: PagedCache, index: int, windows: Listed[int | None]) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self._index = index
        self._windows = windows
        self.is_sliding = windows[index] is not None
        self.is_initialized = True

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing: the blocks are there from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """As `PagedCache.update`."""
        return self._whole.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Columns with those of the forward pass, and 0."""
        columns = query_length if isinstance(query_length, int) else query_length.shape[0]
        return Columns(self.get_seq_length() + columns, self._windows), 0

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


def _not_its_model(what: str, model: PreTrainedModel | None) -> UnsupportedOption:
    own = "which is gone" if model is None else f"a {type(model).__name__}"
    return UnsupportedOption(
        f"{what} outside of a forward pass of the model that the cache was made for, {own}; make a PagedCache for each "
        "model, and call that model with past_key_values=cache"
    )


def _repeated(is_token: Mask, batch: int) -> Mask:
    return is_token if len(is_token) == batch else is_token.repeat(batch // len(is_token), axis=0)


def _check_implementation(model: PreTrainedModel) -> None:
    name = model.config.get_text_config(decoder=True)._attn_implementation
    if name == NAME:
        return
    if not getattr(type(model), "_can_set_attn_implementation", lambda: True)():
        raise UnsupportedOption(
            f"the {type(model).__name__} computes attention by code of its own, which transformers lets no "
            "implementation replace; use another cache"
        )
    raise UnsupportedOption(f"the model's attention implementation is {name!r}; {REMEDY}")


def _depends_on_length(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    return any(parameters.get("rope_type", parameters.get("type")) in _LENGTH_DEPENDENT for parameters in each)
