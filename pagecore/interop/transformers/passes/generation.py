"""The rows of a generation, and the forward pass that runs over them."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Listed
from typing import Any

import torch
from transformers import PreTrainedModel

from pagecore.cache import PagedKVCache
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.interop.transformers.implementation import check_implementation
from pagecore.interop.transformers.inputs.arguments import CACHE, Ids, Mask, read_inputs
from pagecore.interop.transformers.inputs.encoder import EncoderOutput, read_encoder, without_encoder
from pagecore.interop.transformers.inputs.prompts import as_attention_mask, read_prompt
from pagecore.interop.transformers.passes.forward import Forward
from pagecore.interop.transformers.passes.rows import BatchRows
from pagecore.interop.transformers.states.running import RunningStates
from pagecore.interop.transformers.tracing import untraced


class Generation:
    """State of a generation: its rows, and the last forward pass of the model.

    States: idle -> running (`enter`) -> done (`leave`) -> idle. The next call that changes the rows counts the columns
    of a pass that is done; until then they can be cropped.

    Parameters
    ----------
    kv : PagedKVCache
        Holds the tokens of the rows.
    model : PreTrainedModel
        The model whose forward passes run over the rows; held by a weak reference.
    layers, states
        As for `BatchRows`.
    has_encoder : bool
        The rows attend to the output of an encoder, which their forward passes get.
    """

    def __init__(
        self,
        kv: PagedKVCache,
        model: PreTrainedModel,
        *,
        layers: Mapping[int, int] | None = None,
        states: RunningStates | None = None,
        has_encoder: bool = False,
    ) -> None:
        self.rows = BatchRows(kv, layers, states)
        self.has_encoder = has_encoder
        self.is_generating = False  # within a call of generate
        self.gets_whole_prompt = False  # in the next pass, computed columns included
        self._encoded: EncoderOutput | None = None
        self._model = weakref.ref(model)
        self._forward: Forward | None = None
        self._running: torch.nn.Module | None = None

    # -- rows ------------------------------------------------------------------------------------------------------

    @property
    def num_columns(self) -> int:
        """Computed columns, padding included."""
        return self.rows.num_columns + self.num_pending_columns

    @property
    def num_pending_columns(self) -> int:
        """Columns of the last forward pass that are computed, not cropped, and not counted yet."""
        return self._forward.num_kept_columns if self._forward is not None and self._forward.is_done else 0

    def begin(self, ids: Ids, is_token: Mask, namespace: Hashable) -> int:
        """Start a new generation with these prompts; return the number of columns that are computed already."""
        self.rows.check_padding(is_token)
        self.reset()
        return self.rows.begin(ids, is_token, namespace)

    def reset(self) -> None:
        """Remove all rows and forget their namespace."""
        self._count_pass()
        self.rows.clear()
        self.rows.namespace = None

    def select(self, parents: Listed[int]) -> None:
        """Replace row i by row ``parents[i]``."""
        self._count_pass()
        self.rows.select(parents)

    def repeat(self, repeats: int) -> None:
        """Replace each row by `repeats` rows that share its blocks."""
        self._count_pass()
        self.rows.repeat(repeats)

    def crop(self, count: int) -> None:
        """Remove the last `count` columns."""
        if self._forward is not None and 0 < count <= self.num_pending_columns and not self.rows.states:
            self._forward.crop(count)
            return
        self._count_pass()
        self.rows.crop(count)

    def _count_pass(self) -> None:
        """Count the columns of the last forward pass as computed."""
        if self._forward is not None:
            self._forward.commit()

    # -- a call of generate ----------------------------------------------------------------------------------------

    @untraced
    def enter_generate(
        self, model: PreTrainedModel, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> dict[str, Any]:
        """Begin a new generation unless the prompt of a call of ``model.generate`` continues the rows.

        Returns
        -------
        dict
            The options of the call, with an attention mask if they had none.
        """
        self._count_pass()
        self.is_generating = True
        rows = self.rows
        if self.has_encoder:  # the prompt is that of the encoder
            rows.clear()
            return options
        prompt = read_prompt(model, arguments, options) if len(rows) or rows.is_lost else None
        if prompt is not None and rows.is_lost:
            rows.clear()
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
        difference = self.rows.first_difference(ids, is_token)
        if difference is not None:
            row, column = difference
            raise ShapeError(
                f"input_ids differs from the prompt that was passed to begin() in column {column} of row {row}, and "
                f"{self.rows.num_columns} columns are already computed; call begin() with these tokens"
            )

    def without_computed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a pass without the columns that are computed, if it has the whole prompt.

        `generate` removes these columns only for models with layers that attend.
        """
        if not self.gets_whole_prompt:
            return given
        self.gets_whole_prompt = False
        names = [name for name in ("input_ids", "inputs_embeds") if given.get(name) is not None]
        if not self.num_columns or any(given[name].shape[1] <= self.num_columns for name in names):
            return given
        return given | {name: given[name][:, self.num_columns :] for name in names}

    # -- the encoder -----------------------------------------------------------------------------------------------

    @untraced
    def enter_encoder(self) -> None:
        """Start the rows over if `generate` runs the encoder, which it does before the first pass of a decoder."""
        if self.is_generating:
            self._count_pass()
            self.rows.clear()

    @property
    def encoder_states(self) -> torch.Tensor:
        """Hidden states of the encoder in the last pass: ``[batch, columns, dim]``."""
        assert self._encoded is not None
        return self._encoded.states

    @property
    def encoder_columns(self) -> int:
        """Number of encoder columns of the last pass; 0 without rows."""
        return 0 if self._encoded is None or not len(self.rows) else self._encoded.columns

    # -- a forward pass --------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True during a forward pass of the cache's model."""
        return self._forward is not None and self._running is not None

    @property
    def running_pass(self) -> Forward:
        """The forward pass that runs now.

        Raises
        ------
        UnsupportedOption
            No pass of the cache's model is running: another model was called with the cache.
        """
        if self._forward is None or self._running is None:
            raise _not_its_model("update was called", self._model())
        return self._forward

    @property
    def mask_limits(self) -> set[int | None]:
        """Windows and chunks of the masks that the model has made in the running pass; masks may be added."""
        return set() if self._forward is None or self._running is None else self._forward.mask_limits

    def enter(self, given: Mapping[str, Any], module: torch.nn.Module) -> None:
        """Start a forward pass of `module`, the model or the decoder in it, with these arguments."""
        if self._running is not None and module is not self._running:
            return  # the module that runs has called this one
        model = self._model()
        if model is None:
            raise _not_its_model(f"a {type(module).__name__} runs with a PagedCache", None)
        check_implementation(model)
        self._count_pass()
        rows = self.rows
        if rows.is_lost:
            raise UnsupportedOption(
                "the last forward pass failed and left the states of the recurrent layers undefined, so its rows were "
                "removed; call reset() or begin(), and compute the prompt again"
            )
        encoded = None
        if self.has_encoder:
            encoded, given = read_encoder(given), without_encoder(given)
        inputs = read_inputs(given, rows.num_columns)
        if len(rows) and len(rows) != inputs.batch and (not rows.is_begun or inputs.batch % len(rows)):
            raise ShapeError(
                f"the forward pass has {inputs.batch} rows and the cache {len(rows)}; end the generation with reset() "
                "or begin(), or repeat its rows with batch_repeat_interleave()"
            )
        if inputs.past is not None and len(rows) and (inputs.past != _repeated(rows.is_token, inputs.batch)).any():
            raise UnsupportedOption(
                "attention_mask marks other columns as padding than when they were computed, and a paged cache only "
                "stores tokens; call reset() and compute the columns again"
            )
        previous = None if self._forward is None else self._forward.batch
        self._forward = Forward(rows, inputs, model.device, previous, encoded)
        self._encoded = encoded
        self._running = module

    def leave(self, module: torch.nn.Module, has_failed: bool) -> None:
        """End the forward pass of `module`; does nothing for a pass that `enter` refused."""
        if module is not self._running:
            return
        self._running, forward = None, self._forward
        assert forward is not None
        if has_failed:
            forward.abandon()
        else:
            forward.finish()


def _not_its_model(what: str, model: PreTrainedModel | None) -> UnsupportedOption:
    own = "which was deleted" if model is None else f"a {type(model).__name__}"
    return UnsupportedOption(
        f"{what} outside of a forward pass of the model of the cache, {own}; make a PagedCache for each model, and "
        f"call that model with {CACHE}=cache"
    )


def _repeated(is_token: Mask, batch: int) -> Mask:
    return is_token if len(is_token) == batch else is_token.repeat(batch // len(is_token), axis=0)
