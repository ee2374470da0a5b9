"""Oracles of StaticKVCache in plain NumPy, one row at a time."""

import numpy as np


class StaticTwin:
    """Key and value as ``[layers, batch, heads, length, dim]`` arrays of the stored dtype."""

    def __init__(self, layers, batch, heads, length, dims, dtype):
        self.planes = [np.zeros((layers, batch, heads, length, dim), dtype) for dim in dims]
        self.lengths = [0] * layers

    def update(self, layer, key, value, position):
        batch, heads, count, _ = key.shape
        for plane, new in zip(self.planes, (key, value), strict=True):
            given = np.array(new)  # contents before the call
            for b, h, t in np.ndindex(batch, heads, count):
                plane[layer, b, h, position + t] = given[b, h, t].astype(np.float32).astype(plane.dtype)
        end = position + count
        self.lengths[layer] = end
        return tuple(plane[layer, :batch, :, :end].copy() for plane in self.planes)

    def reset(self):
        for plane in self.planes:
            plane[...] = 0
        self.lengths = [0] * len(self.lengths)


class CrossTwin:
    """Encoder outputs as ``[layers, batch, heads, most tokens, dim]`` arrays, with any numbers where none is written.

    `planes` may be filled before the first write, as the memory of the cache may be.
    """

    def __init__(self, layers, batch, heads, most, dims, dtype):
        self.planes = [np.zeros((layers, batch, heads, most, dim), dtype) for dim in dims]
        self.lengths = [0] * layers
        self.written = [0] * layers

    def update(self, layer, key, value):
        batch, heads, count, _ = key.shape
        for plane, new in zip(self.planes, (key, value), strict=True):
            given = np.array(new)
            for b in range(batch):
                for h in range(heads):
                    for t in range(count):
                        plane[layer, b, h, t] = given[b, h, t].astype(np.float32).astype(plane.dtype)
        self.lengths[layer] = count
        self.written[layer] = max(self.written[layer], count)
        return tuple(plane[layer, :batch, :, :count].copy() for plane in self.planes)

    def reset(self):
        for plane in self.planes:
            for layer, count in enumerate(self.written):
                plane[layer, :, :, :count] = 0
        self.lengths, self.written = [0] * len(self.lengths), [0] * len(self.lengths)
