"""Memory of images: activations of the vision tower, pixels and embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.models.parameters import VisionTower

__all__ = ["ImageMemory", "image_memory"]

# Size of an image for a tower that takes images of any size.
DEFAULT_SIZE = 1024
# Processors return pixels of three colours in float32.
BYTES_PER_PIXEL = 3 * 4


@dataclass(frozen=True, slots=True)
class ImageMemory:
    """Bytes of one image.

    Attributes
    ----------
    size : int
        Pixels along each side.
    tokens : int
        Tokens of the text model.
    activations, pixels, embeddings : int
        Bytes while the tower runs, from arrival until then, and from then until the prompt has been computed.
    """

    size: int
    tokens: int
    activations: int
    pixels: int
    embeddings: int


def image_memory(tower: VisionTower, image_size: int | None, itemsize: int) -> ImageMemory:
    """Return the bytes of one image.

    The activations are those of the widest moment of a layer: the residual, its norm, and either queries, keys, values
    and the output, or the features inside the MLP. Attention is computed in tiles.

    Parameters
    ----------
    tower : VisionTower
    image_size : int or None
        Pixels along each side; None for those of the tower, or 1,024.
    itemsize : int
        Bytes of an element of the activations and embeddings.
    """
    size = image_size or tower.image_size or DEFAULT_SIZE
    patches = tower.patches(size)
    widest = 2 * tower.hidden + max(4 * tower.hidden, (1 + tower.is_gated) * tower.width)
    tokens = tower.tokens(size)
    return ImageMemory(
        size=size,
        tokens=tokens,
        activations=patches * widest * itemsize,
        pixels=patches * tower.patch**2 * tower.frames * BYTES_PER_PIXEL,
        embeddings=tokens * tower.depths * tower.text_hidden * itemsize,
    )
