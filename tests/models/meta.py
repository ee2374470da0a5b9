"""Configs of transformers, and modules of torch without memory and without values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.capabilities import require


def config_for(model_type: str, **fields: Any) -> Any:
    """Return a config of transformers; skip the test if its version does not have the type."""
    transformers = require("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"needs a transformers that has {model_type}")
    return transformers.AutoConfig.for_model(model_type, **fields)


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Make tensors on torch's device "meta", and leave out their initialisation, which takes half of the time."""
    torch = require("torch")
    fills = [name for name in vars(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        for name in fills:
            patch.setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
        yield
