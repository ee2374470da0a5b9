"""A pass without gradients, and the spec of the small models' layers."""

from __future__ import annotations

from pagecore import AttentionSpec
from tests.interop.families import torch
from tests.passing import passing

SPEC = AttentionSpec(2, 16, dtype="float32", num_query_heads=4)


def run(model, ids, cache, **options):
    with torch.no_grad():
        return model(ids, **passing(cache), **options).logits
