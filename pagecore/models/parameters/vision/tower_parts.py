"""Parts that vision towers have in common: layers, embeddings of patches and positions.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["Projector", "Sizes", "Tower", "add_positions", "add_tower", "count_colours", "count_patches", "image_side"]

# Adds a projector from the fields of model and tower, the features of a patch, the patches along each side of a token,
# the projections of a deep stack, and the features of the text model.
Projector = Callable[[Tally, Fields, Fields, int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a tower that its parameters follow from, named as in `VisionTower`."""

    layers: int
    hidden: int
    width: int
    patch: int
    frames: int


@dataclass(frozen=True)
class Tower:
    """Names of the fields of a tower, and the structure of its layers.

    Parameters
    ----------
    layers, hidden, width : str
        Fields with the number of layers, the features of a patch, and those inside the MLP; "" for a multiple
        (`mlp_ratio`) of the features of a patch.
    has_norm_bias, has_mlp_bias, has_patch_bias : bool
        Norms, MLPs and the embedding of patches have biases.
    attention_biases : int
        Projections of an attention with a bias, of four.
    is_gated : bool
        The MLP has a gate.
    add_rest : callable
        Adds what is outside of the layers and the embedding of patches.
    add_all : callable, optional
        Adds the whole tower, if its layers differ.
    aliases : mapping
        The tower's own names of fields.
    merge : int, optional
        Patches along each side that become one token of the text model, if no field has the number.
    joins_depths : bool
        The layers of a deep stack give one embedding of a token together.
    """

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    width: str = "intermediate_size"
    has_norm_bias: bool = True
    attention_biases: int = 4
    has_mlp_bias: bool = True
    is_gated: bool = False
    has_patch_bias: bool = True
    add_rest: Callable[[Tally, Fields, Sizes], None] = lambda _tally, _fields, _sizes: None
    add_all: Callable[[Tally, Fields, Sizes], None] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    merge: int | None = None
    joins_depths: bool = False


def add_tower(tally: Tally, fields: Fields, tower: Tower, sizes: Sizes) -> None:
    """Add the parameters of a tower."""
    if tower.add_all is not None:
        tower.add_all(tally, fields, sizes)
        return
    hidden, width, layers = sizes.hidden, sizes.width, sizes.layers
    encoder_linear(tally, hidden, hidden, copies=4 * layers)
    encoder_add(tally, layers * tower.attention_biases * hidden)
    encoder_linear(tally, hidden, width, bias=tower.has_mlp_bias, copies=layers * (1 + tower.is_gated))
    encoder_linear(tally, width, hidden, bias=tower.has_mlp_bias, copies=layers)
    encoder_add(tally, 2 * layers * hidden * (1 + tower.has_norm_bias))
    encoder_linear(tally, count_colours(fields) * sizes.frames * sizes.patch**2, hidden, bias=tower.has_patch_bias)
    tower.add_rest(tally, fields, sizes)


def count_colours(fields: Fields) -> int:
    """Return the channels of an image; 3 if the config does not say it."""
    named = "in_channels" if fields.given("in_channels") is not None else "num_channels"
    return fields.integer(named) if fields.given(named) is not None else 3


def image_side(fields: Fields, name: str) -> int:
    """Return a size in pixels; a list must have equal sides."""
    sides = fields.value(name)
    if not isinstance(sides, list | tuple):
        return fields.integer(name)
    if len(sides) != 2 or sides[0] != sides[1] or type(sides[0]) is not int or not 1 <= sides[0] <= 1 << 20:
        fields.refuse(f"{fields.describe(name)}; it must be an integer, or two equal ones")
    return sides[0]


def count_patches(fields: Fields, sizes: Sizes) -> int:
    """Return the patches of an image of the size that the tower fixes."""
    return (image_side(fields, "image_size") // sizes.patch) ** 2


def add_positions(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add positions of patches and a norm."""
    encoder_add(tally, (count_patches(fields, sizes) + 2) * sizes.hidden)
