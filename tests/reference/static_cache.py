"""Oracle of StaticKVCache in plain NumPy, one row at a time."""

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
