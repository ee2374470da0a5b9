"""The layers of a paged cache, and the arrays of its pools and tables."""

from __future__ import annotations

from pagecore.arrays import Tensor
from pagecore.cache.layers.groups import group_number
from pagecore.cache.layers.sealed import blocks_of
from pagecore.cache.parts import PartsOwner
from pagecore.errors import UnsupportedOption
from pagecore.ops import SealedBlocks
from pagecore.storage import AttentionSpec, Region, Spec


class ArrayMethods(PartsOwner):
    """Specs, groups, planes and block tables of `PagedKVCache`."""

    def group_of(self, layer: int) -> int:
        """Return the number of the group that model layer `layer` belongs to.

        Raises
        ------
        UnsupportedOption
            The layer keeps a state, and belongs to no group.
        """
        place = self._parts.layer(layer)
        if place.keeps_state:
            raise UnsupportedOption(f"layer {layer} keeps a state and belongs to no group; ask for layers that attend")
        return place.group

    def spec(self, layer: int) -> Spec:
        """Return the spec of this rank's part of a model layer; for an alias, that of the layer that it shares.

        Raises
        ------
        ShapeError
            The cache does not have that layer.
        """
        return self._parts.layer(layer).spec

    def plane(self, name: str, layer: int) -> Tensor:
        """Return one plane of a model layer, such as "key", "value" or "latent".

        Returns
        -------
        Tensor
            ``[num_blocks, block_size, *plane.shape]``, or ``[num_blocks, *plane.shape]`` for a plane per block, in the
            plane's dtype; ``[num_slots, *plane.shape]`` for a layer that keeps a state. It aliases the pool and keeps
            its memory alive.

        Raises
        ------
        UnsupportedOption
            The spec of the layer has no plane of that name.
        ShapeError
            The cache does not have that layer.
        DeviceError
            The cache was made with ``device="none"``.
        """
        place = self._parts.layer(layer)
        return self._parts.store.plane(name, place)

    def sealed_planes(self, layer: int) -> SealedBlocks:
        """Return the planes of a layer's sealed blocks as `paged_attention` reads them, without a block table.

        `Batch.group` has the block table and the lengths of a step, in `sealed`.

        Returns
        -------
        SealedBlocks
            Of Tensors that alias the pool and keep its memory alive; see `SealedBlocks` for their shapes.

        Raises
        ------
        UnsupportedOption
            The layer has no sealed blocks.
        ShapeError
            The cache does not have that layer.
        DeviceError
            The cache was made with ``device="none"``.
        """
        place = self._parts.layer(layer)
        if place.sealed_group is None:
            raise UnsupportedOption(
                f"layer {layer} has no sealed blocks; make its spec with format='kivi2' or 'kivi4', or use plane"
            )
        self._parts.store.pool(place)
        assert isinstance(place.spec, AttentionSpec)
        return blocks_of(self._parts.store.pools[place.sealed_group], place.index, place.spec)

    def checkpoint_plane(self, name: str, layer: int) -> Tensor:
        """Return one plane of the checkpoints of a layer that keeps a state: those whose slot `checkpoint` returns.

        Returns
        -------
        Tensor
            ``[num_checkpoints, *plane.shape]``, int8 for a quantised plane, whose scales are the plane
            ``f"{name}_scale"``, see `CheckpointPool`. Without a `checkpoint_format` it is `plane`.

        Raises
        ------
        UnsupportedOption, ShapeError, DeviceError
            As in `plane`, or a layer without a state.
        """
        return self._parts.store.checkpoint_plane(name, self._parts.layer(layer))

    def key(self, layer: int) -> Tensor:
        """Return ``plane("key", layer)``, ``[num_blocks, block_size, num_kv_heads, head_dim]``; it aliases the pool."""
        return self.plane("key", layer)

    def value(self, layer: int) -> Tensor:
        """Return ``plane("value", layer)``, ``[num_blocks, block_size, num_kv_heads, v_head_dim]``; also an alias."""
        return self.plane("value", layer)

    def block_table(self, group: int = 0) -> Tensor:
        """Return the block table of a group, for attention kernels of your own.

        Returns
        -------
        Tensor
            int32 ``[max_sequences + 1, max_blocks]``, read-only. It aliases the index and changes with the cache; on
            CUDA it is a copy on the device, which each prepare updates. `Sequence.row` is the row of a sequence. The
            table of a cross-attention group has a row for each encoder output instead; `Batch.cross` lists them.
            Entries past a row's blocks are 0, and so are the holes that a window left. The last row contains only 0:
            padding refers to it.

        Raises
        ------
        ShapeError
            The cache does not have that group.
        """
        return self._parts.block_tables[group_number(group, self._parts.num_groups)]

    @property
    def row_lengths(self) -> Tensor:
        """Tokens of each row that have slots, including those of a step in flight.

        int32 ``[max_sequences + 1]``, read-only. It aliases the index and changes with the cache; on CUDA it is a copy
        on the device, as `block_table` is. Unused rows are 0, and so is the last, to which padding refers.
        """
        return self._parts.row_lengths

    def regions(self) -> list[Region]:
        """Return the memory of all planes and states as regions, to register it with NIXL or Mooncake in one call.

        Empty for a cache without bytes.
        """
        return self._parts.store.regions()
