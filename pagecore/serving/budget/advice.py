"""Advice for a plan that does not fit, in the order of SGLang's guide for memory that runs out.

1. A smaller `chunked_prefill_size` takes less memory for activations.
2. A smaller `static_fraction` takes memory from the cache.
3. A limit on the images of a step takes memory from the vision tower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagecore.serving.budget.presets import GIB, LEAST_CHUNK, chunk_bytes
from pagecore.serving.memory_classes import Advice, DevicePlan

__all__ = ["advise", "advise_contexts"]


def advise(device: DevicePlan, least_static: int, images: int, bytes_per_image: int) -> tuple[Advice, ...]:
    """Return the changes that make all classes fit, up to the one that suffices; none if they fit.

    Parameters
    ----------
    device : DevicePlan
    least_static : int
        Bytes that weights and the smallest useful cache take.
    images, bytes_per_image : int
        Images of a step, and the bytes that each takes outside of a cache of embeddings.
    """
    missing = _shortage(device)
    if missing <= 0:
        return ()
    found: list[Advice] = []
    chunk = _smaller_chunk(device.chunked_prefill_size, missing)
    fraction = device.static_fraction
    if chunk < device.chunked_prefill_size:
        freed = chunk_bytes(device.chunked_prefill_size) - chunk_bytes(chunk)
        missing -= freed
        text = f"chunked_prefill_size={chunk} with static_fraction={fraction:.3f} frees {_gib(freed)}"
        found.append(Advice("chunked_prefill_size", chunk, freed, missing <= 0, text))
    if missing > 0:
        static = int(device.device_memory * fraction)
        lower = math.floor(1000 * max(least_static, static - missing) / device.device_memory) / 1000
        freed = static - int(device.device_memory * lower)
        if 0 < lower < fraction and freed > 0:
            missing -= freed
            text = f"static_fraction={lower:.3f} frees {_gib(freed)} of the cache"
            found.append(Advice("static_fraction", lower, freed, missing <= 0, text))
    if missing > 0 and images and bytes_per_image:
        fewer = max(0, images - math.ceil(missing / bytes_per_image))
        freed = (images - fewer) * bytes_per_image
        text = f"at most {fewer} images in a step free {_gib(freed)}; smaller images free more"
        found.append(Advice("images", fewer, freed, missing <= freed, text))
    return tuple(found)


def advise_contexts(device: DevicePlan, bytes_per_request: Sequence[int]) -> tuple[Advice, ...]:
    """Return the changes that give the cache room for one request of each length; none if there is room."""
    missing = max(bytes_per_request) - device.nbytes("KV")
    if missing <= 0:
        return ()
    found: list[Advice] = []
    chunk = _smaller_chunk(device.chunked_prefill_size, missing)
    if chunk < device.chunked_prefill_size:
        freed = chunk_bytes(device.chunked_prefill_size) - chunk_bytes(chunk)
        missing -= freed
        text = f"chunked_prefill_size={chunk} leaves {_gib(freed)} more to the cache"
        found.append(Advice("chunked_prefill_size", chunk, freed, missing <= 0, text))
    if missing > 0:
        text = f"the longest request needs {_gib(missing)} more; use more ranks, or a kv format of fewer bits"
        found.append(Advice("ranks", 2 * device.ranks, missing, False, text))
    return tuple(found)


def _shortage(device: DevicePlan) -> int:
    """Return the bytes outside of weights and cache that the static fraction does not leave."""
    room = device.device_memory - int(device.device_memory * device.static_fraction)
    return sum(each.nbytes for each in device.classes if each.name not in ("weights", "KV")) - room


def _smaller_chunk(chunk: int, missing: int) -> int:
    """Return the largest halved chunk that frees `missing` bytes, or the least that frees any."""
    smaller = chunk
    while smaller > LEAST_CHUNK and chunk_bytes(chunk) - chunk_bytes(smaller) < missing:
        smaller = max(LEAST_CHUNK, smaller // 2)
    return smaller


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
