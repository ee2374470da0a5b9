"""Base of the fuzz targets: valid arguments, and the checks after each call."""

import numpy as np

from pagecore import (
    AttentionSpec,
    PagecoreError,
    TensorParallel,
)

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=2)
WINDOWED = AttentionSpec(2, 8, dtype="float32", num_query_heads=2, window=6)


class Target:
    """An object whose methods are called.

    `named` maps the name before a method's dot to its object; a class is instantiated.
    """

    methods = ()

    def __init__(self, random):
        self.random = random
        self.depth = 0

    def callback(self):
        """Call back into the object that is being called, as a value of the caller may."""
        if self.depth > 1:
            return
        self.depth += 1
        try:
            self.mischief()
        except PagecoreError:
            pass
        finally:
            self.depth -= 1

    def mischief(self):
        pass

    def check(self):
        pass

    def finish(self):
        """Release everything at the end of a target's life."""

    # -- good values ---------------------------------------------------------------------------------------------------

    def one(self):
        return int(self.random.integers(0, 4))

    def some(self):
        return int(self.random.integers(1, 9))

    def ids(self):
        return self.random.integers(0, 9, self.some()).tolist()

    def array(self):
        return np.asarray(self.ids(), np.int32)

    def yes(self):
        return bool(self.random.integers(2))

    def none(self):
        return None

    def number(self):
        return float(self.random.integers(0, 100))

    def spec(self):
        return SPEC

    def dtype(self):
        return "float32"

    def device(self):
        return "cpu"

    def layout(self):
        return "layerwise"

    def parallel(self):
        return TensorParallel(0, 1)
