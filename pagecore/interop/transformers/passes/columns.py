"""The lengths that models ask their caches for, in columns of the batch."""

from __future__ import annotations

from pagecore.interop.transformers.passes.generation import Generation


class ColumnCounts:
    """The part of transformers' `Cache` about lengths, for the caches of a generation."""

    _generation: Generation

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return the number of computed columns, padding included."""
        return self._generation.num_columns

    @property
    def mask_limits(self) -> set[int | None]:
        """Windows and chunks of the masks that the model has made in the running forward pass."""
        return self._generation.mask_limits

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the number of columns before those of the forward pass."""
        return self.get_seq_length(layer_idx)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return -1: the length of a row is only limited by the free blocks."""
        return -1
