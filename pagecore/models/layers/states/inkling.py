"""Convolution states of Inkling: of the keys, the values, and the outputs of attention and MLP of each layer.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable

from pagecore.errors import ShapeError
from pagecore.models.config_files.fields import Fields
from pagecore.models.layers.states.recurrent import Dtypes, Planes
from pagecore.storage import Plane
from pagecore.storage.state_shapes import short_conv_planes

__all__ = ["convolutions_of_inkling", "heads_of_inkling"]


def heads_of_inkling(fields: Fields, slides: bool) -> tuple[int, int, int]:
    """Return the query heads, the key-value heads and the head dim of a layer with or without a window."""
    prefix = "swa_" if slides else ""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    queries, kv_heads, dim = (fields.integer(prefix + name) for name in names)
    return queries, kv_heads, dim


def convolutions_of_inkling(slides: Callable[[Fields, int], bool]) -> Callable[[Fields, Dtypes, int], Planes]:
    """Return a reader of the planes of a layer; `slides` returns True for one with a window."""

    def planes(fields: Fields, dtypes: Dtypes, layer: int) -> Planes:
        _, kv_heads, dim = heads_of_inkling(fields, slides(fields, layer))
        hidden, kernel = fields.integer("hidden_size"), fields.integer("conv_kernel_size", min=2)

        def split(ranks: int = 1) -> tuple[Plane, ...]:
            if kv_heads % ranks and ranks % kv_heads:
                raise ShapeError(
                    f"kv_heads is {kv_heads}, which {ranks} ranks can neither split nor replicate; the number of ranks "
                    "must divide it, or be a multiple of it"
                )
            own = max(1, kv_heads // ranks) * dim
            # Every rank has the whole outputs.
            widths = {"conv_key": own, "conv_value": own, "conv_attention": hidden, "conv_mlp": hidden}
            shapes = {name: short_conv_planes(width, kernel, dtype=dtypes.window)[0] for name, width in widths.items()}
            return tuple(Plane(name, plane.shape, plane.dtype, plane.per) for name, plane in shapes.items())

        return split

    return planes
