"""The vision tower of Inkling: matrices that fold patches of growing size, without attention.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import Sizes, Tower, count_colours

__all__ = ["INKLING_SIZES", "INKLING_TOWER"]

INKLING_SIZES: Mapping[str, object] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "patch_size": 40,
    "temporal_patch_size": 2,
    "text_hidden_size": 6144,
}
# Images, pixels along each side, and features of what a layer returns.
_Scale = tuple[int, int, int]


def _factors(number: int) -> list[int]:
    """Return the prime factors, the largest first."""
    found, divisor = [], 2
    while divisor * divisor <= number:
        if number % divisor:
            divisor += 1
        else:
            found.append(divisor)
            number //= divisor
    return sorted([*found, *([number] if number > 1 else [])], reverse=True)


def _scales(colours: int, patch: int, frames: int) -> list[_Scale]:
    """Return the scales that layers can have: pixels are folded first, then images."""
    scales, side, images = [(1, 1, colours)], 1, 1
    for factor in _factors(patch):
        side *= factor
        scales.append((1, side, -(-side * side * colours // 64) * 64))
    for factor in _factors(frames):
        images *= factor
        scales.append((images, side, side * side * colours * images * 64))
    return scales


def _chosen(ideal: list[float], sides: list[float]) -> list[int]:
    """Return the scale of each step: the closest one, or with fewer steps than scales different ones, in order.

    The latter have the least sum of distances.
    """
    if len(ideal) > len(sides):
        return [min(range(len(sides)), key=lambda i: abs(each - sides[i])) for each in ideal]
    best: list[tuple[float, list[int]]] = [(0.0, [])] * (len(sides) + 1)  # by the number of scales that may be used
    for step, each in enumerate(ideal):
        longer: list[tuple[float, list[int]]] = [(math.inf, [])] * (step + 1)
        for i in range(step, len(sides)):
            cost, before = best[i]
            longer.append(min(longer[-1], (cost + abs(each - sides[i]), [*before, i])))
        best = longer
    return best[-1][1]


def _add_all(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add a matrix for each layer; the logarithms of what layers have folded increase in about equal steps."""
    colours, text = count_colours(fields), fields.integer("text_hidden_size")
    scales = _scales(colours, sizes.patch, sizes.frames)
    step = math.log(sizes.patch**2 * sizes.frames * colours) / sizes.layers
    ideal = [layer * step for layer in range(sizes.layers + 1)]
    inner = _chosen(ideal, [math.log(images * side**2) for images, side, _ in scales])[1:-1]
    chosen = [scales[0], *(scales[i] for i in inner), scales[-1]]
    for layer in range(sizes.layers):
        (images, side, inputs), (more_images, larger, outputs) = chosen[layer : layer + 2]
        is_last = layer + 1 == sizes.layers
        folded = inputs * (more_images // images) * (larger // side) ** 2
        encoder_linear(tally, folded, text if is_last else outputs)
        encoder_add(tally, text if is_last else outputs)  # a norm


INKLING_TOWER = Tower(width="", add_all=_add_all, aliases={"num_hidden_layers": "n_layers"})
