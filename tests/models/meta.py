"""Modules of torch without memory and without values."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.capabilities import require


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Make tensors on torch's device "meta", and leave out their initialisation, which takes half of the time."""
    torch = require("torch")
    fills = [name for name in vars(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        for name in fills:
            patch.setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
        yield
