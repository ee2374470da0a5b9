"""`use_in_generate_batch`: pagecore's attention in the continuous batching of transformers."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from pagecore.errors import DeviceError, PagecoreError, UnsupportedDtype, UnsupportedOption
from pagecore.interop.transformers.generate_batch.attention import BATCH_NAME, REMEDY, batch_keywords
from pagecore.interop.transformers.generate_batch.caches import cache_class, holders
from pagecore.interop.transformers.implementation import FLOATS
from pagecore.interop.transformers.tracing import untraced

_KINDS = ("full_attention", "sliding_attention")
_MANAGER = "_cached_continuous_batching_manager"


def use_in_generate_batch(model: PreTrainedModel) -> BatchedAttention:
    """Serve `model.generate_batch` with pagecore's attention, over the paged cache that transformers allocates.

    transformers schedules requests, allocates blocks, shares prefixes and samples as before. Attention writes new keys
    and values to their blocks and reads cached ones there; with SDPA, transformers gathers the keys of all requests in
    every layer and masks each query's foreign keys. `generate_batch`, `init_continuous_batching` and
    `continuous_batching_context_manager` are served, sliding windows and mixed layers included.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder on the host in float32, float16 or bfloat16, with layers of full and sliding attention. Its
        attention implementation becomes "pagecore_flash" until the handle is closed. Other calls of the model run
        SDPA meanwhile.

    Returns
    -------
    BatchedAttention
        Close it, or use it as a context manager, to undo the call.

    Raises
    ------
    UnsupportedOption
        The model has a layer that `generate_batch` or this attention does not serve; its attention cannot be
        replaced; it is in use already; it keeps a persistent manager; or the installed transformers has another
        paged cache.
    UnsupportedDtype, DeviceError
        The model has another dtype, or is not on the host.

    Examples
    --------
    >>> with use_in_generate_batch(model):  # doctest: +SKIP
    ...     results = model.generate_batch(prompts, max_new_tokens=32)
    """
    found = cache_class()
    _check_model(model)
    return BatchedAttention(model, found)


class BatchedAttention:
    """Handle of `use_in_generate_batch`; a context manager.

    transformers catches the errors of a forward pass and reports them as text in the results. The first typed error
    is also in `error`, and leaving the context raises it.

    Attributes
    ----------
    error : PagecoreError or None
    """

    def __init__(self, model: PreTrainedModel, kind: type) -> None:
        self._model: PreTrainedModel | None = model
        self._errors: list[PagecoreError] = []
        self._cache_class = kind
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self._previous = [(config, config._attn_implementation) for config in _configs(model)]
        # model.set_attn_implementation would look for a kernel library, because the name contains "flash".
        for config, _ in self._previous:
            config._attn_implementation_internal = BATCH_NAME
        self._hook = model.register_forward_pre_hook(self._enter, with_kwargs=True)

    @property
    def error(self) -> PagecoreError | None:
        """The first typed error of a forward pass, or None."""
        return self._errors[0] if self._errors else None

    def close(self) -> None:
        """Restore the attention implementation of the model; a second call does nothing.

        A manager that `generate_batch(persistent_manager=True)` kept is destroyed. Stop a manager that
        `init_continuous_batching` returned first.

        Raises
        ------
        UnsupportedOption
            A manager still runs requests of this model; nothing has changed.
        """
        if self._model is None:
            return
        if hasattr(self._model, _MANAGER):
            self._model.destroy_cached_continuous_batching_manager()
        running = {name for cache in self._caches for name in holders(cache)}
        if running:
            raise UnsupportedOption(
                f"{len(running)} requests of generate_batch hold blocks that only this attention can read; stop their "
                "manager first"
            )
        self._undo()

    def _undo(self) -> None:
        self._hook.remove()
        for config, previous in self._previous:
            config._attn_implementation_internal = previous
        self._model = None

    def __enter__(self) -> BatchedAttention:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if raised is not None and self._model is not None:
            self._undo()
            return
        self.close()
        if self.error is not None:
            raise self.error

    @untraced
    def _enter(
        self, _: torch.nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        cache = given.get("cache")
        if not isinstance(cache, self._cache_class):
            return None
        self._caches.add(cache)
        return arguments, batch_keywords(given, given["cache"].dtype, self._errors)


def _check_model(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generate_batch"):
        raise UnsupportedOption(f"expected a model of transformers with generate_batch, got {type(model).__name__}")
    if model.config._attn_implementation == BATCH_NAME:
        raise UnsupportedOption("use_in_generate_batch already serves this model; close its handle first")
    if model.config.is_encoder_decoder:
        raise UnsupportedOption("the model has an encoder, which generate_batch does not serve; call model.generate")
    if not getattr(type(model), "_can_set_attn_implementation", lambda: True)():
        raise UnsupportedOption(
            f"the {type(model).__name__} computes attention by code of its own, which transformers cannot replace; "
            "call model.generate with another cache"
        )
    if hasattr(model, _MANAGER):
        raise UnsupportedOption(
            "the model keeps a persistent manager of generate_batch; call "
            "model.destroy_cached_continuous_batching_manager() first"
        )
    if model.device.type != "cpu":
        raise DeviceError(
            f"the model is on {model.device}; use_in_generate_batch serves models on the host: move it, or use "
            "generate_batch with flash attention"
        )
    if model.dtype not in FLOATS:
        raise UnsupportedDtype(f"the model is {model.dtype}; run it in float32, float16 or bfloat16")
    _check_layers(model)


def _check_layers(model: PreTrainedModel) -> None:
    """Raise UnsupportedOption with the number of the first layer that `generate_batch` cannot store."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    for layer, kind in enumerate(kinds):
        if kind not in _KINDS:
            raise UnsupportedOption(
                f"layer {layer} is of type {kind!r}; generate_batch stores {' and '.join(_KINDS)} only: {REMEDY}"
            )
        if kind == "sliding_attention" and not window:
            raise UnsupportedOption(
                f"layer {layer} is of type {kind!r}, but the config has no sliding_window; set it, or {REMEDY}"
            )
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for module in model.get_decoder().modules():
        if not hasattr(module, "layer_idx"):
            continue
        number, own = module.layer_idx, getattr(module, "head_dim", dim)
        if hasattr(module, "kv_lora_rank"):
            raise UnsupportedOption(
                f"layer {number} stores latents, but generate_batch stores keys and values alone; {REMEDY}"
            )
        if isinstance(own, int) and own != dim:
            raise UnsupportedOption(
                f"layer {number} has heads of dim {own}, but generate_batch stores {dim} in all layers; {REMEDY}"
            )


def _configs(model: PreTrainedModel) -> list[Any]:
    """Return the configs that the layers of the decoder read their attention implementation from."""
    decoders = [part for part in model.get_decoder().modules() if isinstance(part, PreTrainedModel)]
    configs = [model.config, model.config.get_text_config(decoder=True), *(part.config for part in decoders)]
    return list({id(config): config for config in configs}.values())
