"""A small Llama that attends with pagecore, and a cache of its own."""

from __future__ import annotations

import pytest


@pytest.fixture
def model():
    from tests.interop.families import make_model  # its import skips a module if torch is missing

    model = make_model("llama")
    model.set_attn_implementation("pagecore")  # tests share the model
    return model


@pytest.fixture
def cache(model):
    from tests.interop.families import make_cache

    return make_cache(model)
