"""Methods of a host tier for engines with schedulers of their own: copies of blocks that the engine names."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index._integers import int32_array
from pagecore.storage.checks import member
from pagecore.tiers.host.methods.parts import TierParts


class CopyMethods(TierParts):
    """`HostTier.load_to_device_per_layer` and `backup_from_device_all_layers`."""

    def load_to_device_per_layer(
        self, layer: int, host_blocks: ArrayLike, device_blocks: ArrayLike, *, stream: int | None = None
    ) -> None:
        """Copy host blocks to blocks of the cache in one layer, such as the next that a model computes.

        The trees are not involved: the caller holds the blocks of both sides (`reserve`, `hold`) and orders the copies.

        Parameters
        ----------
        layer : int
            Layer of the model. For a layer that keeps a state, the blocks are slots.
        host_blocks, device_blocks : array_like of int
            ``[n]`` each, not the null block.
        stream : int, optional
            Stream of the copies on CUDA; by default that of the cache's last step.

        Raises
        ------
        ShapeError, InvalidBlock
            A layer or block that does not exist, or lists of different lengths.
        UnsupportedOption
            A layer of cross attention, which the tier leaves out.
        DeviceError
            The stream is being captured into a graph.
        """
        self._require_memory()
        place = self._parts.layer(layer)
        if not place.keeps_state and place.cached_group >= len(self._parts.cached_groups):
            raise UnsupportedOption(f"layer {layer} is cross attention, which a host tier leaves out")
        pairs = _paired(host_blocks, device_blocks)
        self._transfers.copies.run_layer(layer, pairs, to_device=True, stream=self._transfers.stream_of(stream))

    def backup_from_device_all_layers(
        self, device_blocks: ArrayLike, host_blocks: ArrayLike, *, lane: int = 0, stream: int | None = None
    ) -> None:
        """Copy blocks of the cache to host blocks in all layers of a lane; see `load_to_device_per_layer`.

        Parameters
        ----------
        device_blocks, host_blocks : array_like of int
            ``[n]`` each, not the null block.
        lane : int
            Group of tokens; or the number of groups, for slots of states.
        stream : int, optional
            Stream of the copies on CUDA; by default that of the cache's last step.

        Raises
        ------
        ShapeError, InvalidBlock
            A lane or block that does not exist, or lists of different lengths.
        DeviceError
            The stream is being captured into a graph.
        """
        self._require_memory()
        number = member("lane", lane, self.num_lanes, "the tier")
        pairs = [np.zeros((0, 2), np.int32)] * self.num_lanes
        pairs[number] = _paired(device_blocks, host_blocks)
        self._transfers.copies.run(pairs, to_device=False, stream=self._transfers.stream_of(stream))


def _paired(sources: ArrayLike, targets: ArrayLike) -> NDArray[np.int32]:
    """Return (source, target) of each block: int32 ``[n, 2]``."""
    both = [int32_array(each, "block", ShapeError).reshape(-1) for each in (sources, targets)]
    if len(both[0]) != len(both[1]):
        raise ShapeError(f"{len(both[0])} source blocks are given for {len(both[1])} targets; give one for each")
    return np.stack(both, axis=1)
