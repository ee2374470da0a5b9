"""Helpers of the tests of `generate` with a paged cache."""

from __future__ import annotations

from contextlib import contextmanager
from weakref import WeakKeyDictionary

import pytest

from tests.interop.families import dynamic_cache, torch
from tests.passing import passing

KINDS_OF_ATTENTION = ["llama", "gemma3", "deepseek_v3"]
WINDOWED = pytest.mark.parametrize("family", KINDS_OF_ATTENTION)


def run(model, ids, cache, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 8, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **passing(cache), **options).tolist()


_expected = WeakKeyDictionary()


def expect(model, ids, mask=None, **options):
    """Return the tokens with a DynamicCache; the model attends with "pagecore" afterwards.

    Tests ask a shared model for the same tokens; without sampling, they are computed once.
    """
    known = {} if options.get("do_sample") else _expected.setdefault(model, {})
    call = repr((ids.tolist(), None if mask is None else mask.tolist(), sorted(options.items())))
    if call not in known:
        known[call] = run(model, ids, dynamic_cache(model), mask, **options)
    model.set_attn_implementation("pagecore")
    return known[call]


def num_cached(cache):
    cache.reset()
    cache.kv.check_invariants()
    return cache.kv.stats().num_cached_blocks


@contextmanager
def computed(model):
    """Record the number of columns of each forward pass."""
    columns = []

    def count(_, arguments, options):
        columns.append((options.get("input_ids") if not arguments else arguments[0]).shape[1])

    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    yield columns
    hook.remove()


@contextmanager
def compiled(model):
    """Let torch.compile trace the forward passes of a model."""
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    try:
        yield
    finally:
        del model.forward
        torch.compiler.reset()


class Failure(Exception):
    pass


@contextmanager
def failing(model, error, layer=1):
    def fail(*_):
        raise error

    hook = model.base_model.layers[layer].register_forward_pre_hook(fail)
    yield
    hook.remove()
