"""One forward pass of a model: take blocks for the new columns, write and attend in each layer, commit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagecore.cache import Batch
from pagecore.errors import OutOfRows, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.interop.transformers.implementation import FLOATS, REMEDY, has_window_in_cache_only
from pagecore.interop.transformers.inputs.arguments import Inputs, Mask
from pagecore.interop.transformers.inputs.encoder import EncoderOutput
from pagecore.interop.transformers.passes.absorbed import Absorbed, check_latents
from pagecore.interop.transformers.passes.biased import biased_attention
from pagecore.interop.transformers.passes.rows import BatchRows
from pagecore.interop.transformers.passes.stored import StoredTokens, equal_rows
from pagecore.interop.transformers.states.running import Checkpoints, refuse_padding_after_tokens
from pagecore.interop.transformers.tracing import untraced
from pagecore.storage import CrossSpec, LatentSpec, Spec
from pagecore.storage.specs.attended import attended_keys, chunk_of


class Forward:
    """The new columns of a batch in one forward pass.

    When a generation begins with several equal rows (beams, several answers to one prompt), only the first of them is
    stored and attended; `commit` forks the others from it.

    States: prepared (constructor) -> done (`finish`) -> over (`commit`); prepared -> over (`abandon`). The columns of a
    pass that is done can still be cropped: they are counted when the next pass begins. If the constructor fails, or the
    pass is abandoned, the rows are as before the pass. Recurrent layers update their states in place, so that an
    abandoned pass loses the rows of a model with such layers.

    Parameters
    ----------
    rows : BatchRows
    inputs : Inputs
    device : torch.device
        Device of the model.
    previous : Batch or None
        Batch of the previous pass; reused if its sizes match.
    encoded : EncoderOutput or None
        Output of the encoder that the rows attend to.
    """

    def __init__(
        self,
        rows: BatchRows,
        inputs: Inputs,
        device: torch.device,
        previous: Batch | None,
        encoded: EncoderOutput | None = None,
    ) -> None:
        self._rows = rows
        self._encoded = encoded
        self._is_token = inputs.is_token
        self._given_ids = inputs.given_ids
        self._stored: set[int] = set()
        self._attended: set[int] = set()
        # Windows and chunks of the masks that the model makes for this pass; None for a mask of all keys.
        self.mask_limits: set[int | None] = set()
        self.is_done = False
        self.is_over = False
        self._kept: int | None = None  # columns that `crop` has left; None if it was not called
        self._before = rows.snapshot()
        try:
            self._tokens = self._take_rows(inputs, device)
            is_token = self._tokens.is_token
            # The pass runs on torch's current stream; without this, the cache would use CuPy's current stream.
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            # The first pass of a generation also writes encoder tokens, for which a batch of decoding has no room.
            has_room = encoded is None or self._before.count > 0
            out = previous if previous is not None and has_room and _fits(previous, is_token) else None
            self.batch = rows.cache.prepare(rows.sequences, is_token.sum(axis=1), out=out, stream=stream)
        except BaseException:
            rows.restore(self._before)
            raise
        if rows.states:
            try:
                self._start_states()
            except BaseException:
                self.abandon()
                raise

    def _take_rows(self, inputs: Inputs, device: torch.device) -> StoredTokens:
        """Open the rows, or repeat those of a prompt, and append the new ids; return the tokens that are stored."""
        rows, is_first = self._rows, len(self._rows) == 0
        if rows.states:
            before = np.zeros(1, np.int64) if is_first else rows.is_token.sum(axis=1)
            refuse_padding_after_tokens(before.repeat(inputs.batch // len(before)), inputs.is_token)
        if is_first:
            _check_room(rows, inputs.batch)
        elif len(rows) != inputs.batch:
            rows.repeat(inputs.batch // len(rows))
        ids, equal = rows.reusable_ids(inputs), None
        outputs = [] if self._encoded is None or not is_first else _outputs(self._encoded, inputs.batch)
        if is_first and ids is not None:
            equal = equal_rows(ids, inputs.is_token, [digest for _, digest in outputs])
        stored = StoredTokens(inputs.is_token, equal, device)
        if is_first:
            rows.open(len(stored.rows), [outputs[row] for row in stored.rows] if outputs else outputs)
        if ids is not None:
            rows.append_ids(stored.rows_of(ids), stored.is_token)
        return stored

    def _start_states(self) -> None:
        before = self._tokens.spread(self._rows.is_token.sum(axis=1))
        given = self.batch.host.states
        assert given is not None
        slots = (given.state_read, given.checkpoint_lengths, given.checkpoint_write)
        self._rows.states.start(before, self._is_token, Checkpoints(*map(self._tokens.at_rows, slots)))

    @property
    def num_columns(self) -> int:
        """Number of new columns."""
        return int(self._is_token.shape[1])

    @property
    def num_kept_columns(self) -> int:
        """Number of new columns that have not been cropped."""
        return self.num_columns if self._kept is None else self._kept

    def check_running(self) -> None:
        """Raise UnsupportedOption unless the pass runs."""
        if self.is_done or self.is_over:
            raise UnsupportedOption("the forward pass of this update is over; run the model again")

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values ``[batch, heads, columns, dim]`` of a layer, or its latents and rope parts."""
        self.check_running()
        for array in (key, value):
            self._tokens.check(array)
        if key.requires_grad or value.requires_grad:
            raise UnsupportedOption(
                "the keys and values of the forward pass require grad, and a paged cache has no gradients; run the "
                "model under torch.no_grad() or torch.inference_mode(), as generate does"
            )
        if key.dtype not in FLOATS:
            raise UnsupportedDtype(f"the keys are {key.dtype}; run the model in float32, float16 or bfloat16")
        index = self._rows.layers.get(layer)
        if index is None:
            raise UnsupportedOption(
                f"layer {layer} of the model stores keys, but the cache was made for a config with layers "
                f"{sorted(self._rows.layers)} that do; make a PagedCache for the model as it is now"
            )
        spec, packed = self._rows.cache.spec(index), (self._tokens.pack(key), self._tokens.pack(value))
        if isinstance(spec, LatentSpec):
            check_latents(spec, layer, key, value)
            packed = packed[0][:, 0], packed[1][:, 0]
        self._rows.cache.write(index, *packed, self.batch)
        self._stored.add(layer)

    # -- the encoder -----------------------------------------------------------------------------------------------

    def is_cross(self, layer: int) -> bool:
        """Return True for a layer that attends to the encoder."""
        return isinstance(self._rows.cache.spec(self._rows.layers[layer]), CrossSpec)

    @property
    def finds_encoder(self) -> bool:
        """True if the encoder's keys and values of all rows are in the cache."""
        return self.batch.cross is None or self.batch.cross.num_tokens == 0

    def store_encoder(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the encoder's keys and values ``[batch, heads, columns, dim]`` of a layer, without padding."""
        encoded, cross = self._encoded, self.batch.cross
        assert encoded is not None
        assert cross is not None
        for array in (key, value):
            if array.ndim != 4 or (array.shape[0], array.shape[2]) != encoded.is_token.shape:
                raise ShapeError(
                    f"a layer passed encoder keys or values of shape {tuple(array.shape)}; expected [rows, heads, "
                    f"columns, dim] with {encoded.is_token.shape[0]} rows of {encoded.columns} columns"
                )
            if array.requires_grad:
                raise UnsupportedOption(
                    "the encoder's keys or values require grad, and a paged cache has no gradients; run the model "
                    "under torch.no_grad() or torch.inference_mode(), as generate does"
                )
        is_new = cross.host.query_lens.numpy()[: len(self._rows.sequences)] > 0
        rows = self._tokens.rows[is_new]
        if len(rows):
            chosen, tokens = (
                torch.from_numpy(each).to(key.device) for each in (rows, np.flatnonzero(encoded.is_token[rows]))
            )
            keys, values = (array[chosen].transpose(1, 2).flatten(0, 1)[tokens] for array in (key, value))
            self._rows.cache.write(self._rows.layers[layer], keys, values, self.batch)
        self._stored.add(layer)

    @untraced
    def attend_biased(self, layer: int, query: torch.Tensor, scale: float | None, bias: torch.Tensor) -> torch.Tensor:
        """Return outputs as `attend` does, with `bias` ``[1, heads, columns, all columns]`` added to the scores."""
        self._tokens.check(query)
        rows, tokens = self._rows, self._tokens
        is_token = np.concatenate([rows.is_token, tokens.is_token], axis=1) if rows.num_columns else tokens.is_token
        stored = tokens.pick(query)
        attended = biased_attention(rows.cache, rows.layers[layer], self.batch, stored, bias, is_token, scale)
        self._attended.add(layer)
        return tokens.repeat(attended)

    @untraced
    def attend(
        self,
        layer: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        scale: float | None,
        softcap: float,
        window: int | None,
        sinks: torch.Tensor | None,
        *,
        window_of_module: int | None = None,
    ) -> torch.Tensor:
        """Return outputs [batch, columns, heads, dim] of queries [batch, heads, columns, dim]; 0 for padding.

        With latents in the cache, the projection of the attention `module` is applied to queries and outputs. A layer
        that attends to the keys of another may pass the queries of the last columns only. If `window` is None and the
        model makes several masks, the layer attends with that of `window_of_module`.
        """
        dropped = self.num_columns - query.shape[2] if getattr(module, "is_kv_shared_layer", False) else 0
        if dropped > 0:
            query = torch.nn.functional.pad(query, (0, 0, dropped, 0))
        self._tokens.check(query)
        index = self._rows.layers[layer]
        spec = self._rows.cache.spec(index)
        if window is None and not self.is_cross(layer):
            window = self._window_of_mask(module, spec, window_of_module)
        if window != spec.window:
            raise UnsupportedOption(
                f"layer {layer} attends with a window of {window}, but its spec in the cache has window {spec.window}; "
                "make the cache with specs that have the model's windows"
            )
        options: dict[str, Any] = {"softcap": softcap} if softcap or not isinstance(spec, LatentSpec) else {}
        if scale is not None:
            options["scale"] = scale
        if sinks is not None:
            options["sinks"] = sinks.detach()
        packed = self._tokens.pack(query)
        if isinstance(spec, LatentSpec):
            attended = self._attend_latents(layer, Absorbed(module, spec, layer, query), packed, options)
        else:
            attended = self._rows.cache.attend(index, packed, self.batch, **options)
        self._attended.add(layer)
        return self._tokens.unpack(attended)[:, max(dropped, 0) :]

    def _window_of_mask(self, module: torch.nn.Module, spec: Spec, window: int | None) -> int | None:
        """Return the window of a layer whose attention gets None or nothing: that of the mask that the model makes."""
        if len(self.mask_limits) != 1:  # the layer chooses one of the masks by its own window, or passes None for all
            return window if window in self.mask_limits else None
        (limit,) = self.mask_limits
        if limit is None and has_window_in_cache_only(module):
            return attended_keys(spec).window
        return None if limit == chunk_of(spec) else limit

    def _attend_latents(
        self, layer: int, absorbed: Absorbed, query: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        if "softcap" in options:
            raise UnsupportedOption(f"layer {layer} attends to latents with a softcap, which is not supported")
        index = self._rows.layers[layer]
        attended = self._rows.cache.attend(index, absorbed.query(query), self.batch, **options)
        return absorbed.value(attended)

    def finish(self) -> None:
        """Mark the pass as done; abandon it and raise if a layer has not stored its keys or not attended to them."""
        if self.is_over:
            return
        layers = set(self._rows.layers)
        written = {layer for layer in layers if not (self.finds_encoder and self.is_cross(layer))}
        for what, seen, expected in (
            ("stored no keys", self._stored, written),
            ("did not attend to its paged keys", self._attended, layers),
        ):
            if not seen >= expected:
                self.abandon()
                raise UnsupportedOption(
                    f"layer {min(expected - seen)} of the model {what}; it must run with all {len(layers)} layers of "
                    f"the cache, each through its attention implementation: {REMEDY}"
                )
        missing = self._rows.states.layers_not_run()
        if missing:
            self.abandon()
            raise UnsupportedOption(
                f"recurrent layer {missing[0]} of the model did not update its state; it must run with all layers of "
                "the cache, and after the cache was made its forward method must not be replaced"
            )
        self._rows.states.stop()
        self.is_done = True

    def crop(self, count: int) -> None:
        """Leave out the last `count` columns of a pass that is done; the others stay until `commit` counts them."""
        self._kept = self.num_kept_columns - count

    def commit(self) -> None:
        """Count the columns that have not been cropped as computed; abandon a pass that is not done."""
        if self.is_over:
            return
        if not self.is_done:
            self.abandon()
            return
        self.is_done, self.is_over = False, True
        rows, counted = self._rows, self._tokens.is_token[:, : self._kept]
        is_cut = self._kept is not None
        rows.cache.commit(self.batch, counted.sum(axis=1) if is_cut else None)
        if is_cut:
            rows.forget_past([sequence.num_computed_tokens for sequence in rows.sequences])
        rows.extend(
            counted, None if self._given_ids is None else self._tokens.rows_of(self._given_ids)[:, : self._kept]
        )
        if self._tokens.copies is not None:
            rows.select_stored(self._tokens.copies)

    def abandon(self) -> None:
        """Undo the pass."""
        if self.is_over:
            return
        self.is_done, self.is_over = False, True
        self._rows.cache.abandon(self.batch)
        self._rows.states.stop()
        if self._rows.states and self._before.count:
            self._rows.lose()
        else:
            self._rows.restore(self._before)


def _fits(batch: Batch, is_token: Mask) -> bool:
    if batch.cross is not None and batch.cross.max_tokens:
        return False  # a batch with room for encoder tokens is larger than a later pass needs
    return not batch.in_flight and (batch.max_sequences, batch.max_tokens) == (len(is_token), int(is_token.sum()))


def _check_room(rows: BatchRows, count: int) -> None:
    free = rows.cache.max_sequences - rows.cache.num_sequences
    if count > free:
        raise OutOfRows(
            f"the forward pass has {count} rows, but only {free} of {rows.cache.max_sequences} rows are free; make the "
            "cache with a larger max_sequences"
        )


def _outputs(encoded: EncoderOutput, batch: int) -> list[tuple[int, bytes]]:
    """Return the number of encoder tokens and the digest of each row."""
    if len(encoded.states) != batch:
        raise ShapeError(f"the encoder's output has {len(encoded.states)} rows and the decoder's pass {batch}")
    return list(zip(encoded.lengths, encoded.digests(), strict=True))
