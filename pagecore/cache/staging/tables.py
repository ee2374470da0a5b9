"""The device's copy of a cache's block tables, and the pinned memory through which steps update it."""

from __future__ import annotations

from pagecore.arrays import cuda, zeros
from pagecore.arrays.cuda.devices import check_device, device_index
from pagecore.arrays.cuda.pinned import PinnedRing
from pagecore.arrays.tensors.streams import stream_handle
from pagecore.cache.staging._packing import COUNT_BYTES
from pagecore.errors import DeviceError
from pagecore.index import BlockTables
from pagecore.ops.cuda.moves._moves import scatter_entries


class Staging:
    """The device's copy of a cache's block tables, and the pinned memory through which it is updated.

    Attributes
    ----------
    device : int
    block_tables : list of Tensor
        int32 ``[max_sequences + 1, max_blocks]`` for each group, as of the last step that was sent.
    row_lengths : Tensor
        int32 ``[max_sequences + 1]``, as of the last step that was sent.
    stream : int
        Stream of the last step; later work waits for it, also on another stream.
    """

    def __init__(self, tables: BlockTables, device: str) -> None:
        index = device_index(device)
        assert index is not None
        check_device(index)
        self.device = index
        self.tables = tables
        self.runtime = cuda.runtime()
        self.ring = PinnedRing(self.runtime, index)
        self.stream = self.runtime.current_stream(index)
        self._passed = self.runtime.make_event(index)
        rows, width = tables.max_sequences + 1, tables.max_blocks_per_sequence
        tables.follow_changes()
        self.memory = zeros((tables.num_groups * rows * width + rows,), "int32", device)
        self.block_tables = [
            self.memory[first : first + rows * width].reshape(rows, width)
            for first in range(0, tables.num_groups * rows * width, rows * width)
        ]
        self.row_lengths = self.memory[tables.num_groups * rows * width :]
        self._is_lost = False

    def stream_of(self, stream: object) -> int:
        """Return the handle of the stream of a step; None is CuPy's current stream."""
        handle = stream_handle(stream, None, self.device)
        self.refuse_captured(handle)
        if handle != self.stream:
            self.refuse_captured(self.stream)
        return handle

    def refuse_captured(self, stream: int) -> None:
        """Raise DeviceError if the stream is being captured into a graph."""
        if self.runtime.is_capturing(stream):
            raise DeviceError(
                f"stream {stream:#x} is being captured: a graph can use a step, but not prepare, undo, seal or swap "
                "one; do that before the capture begins, or after it"
            )

    def switch_stream(self, stream: int) -> None:
        """Make `stream` current; its work waits for everything submitted to the previous stream."""
        if stream != self.stream:
            self._passed.record(self.stream)
            self.runtime.wait_event(stream, self._passed)
            self.stream = stream

    def await_stream(self, stream: int) -> None:
        """Let later work of the current stream wait for everything submitted to `stream`; skipped in a capture."""
        if self.runtime.is_capturing(stream) or self.runtime.is_capturing(self.stream):
            return
        self._passed.record(stream)
        self.runtime.wait_event(self.stream, self._passed)

    def begin_sending(self) -> None:
        """Start a transfer of table changes; unless end_sending follows, the next one sends all tables again."""
        if self._is_lost:
            self.runtime.fill(self.memory.pointer, 0, self.memory.nbytes, self.stream)
            self.tables.follow_changes()
        self._is_lost = True

    def end_sending(self) -> None:
        """Note that all changes taken since begin_sending were submitted."""
        self._is_lost = False

    def apply(self, address: int, capacity: int) -> None:
        """Submit the kernel that applies the changes at a device address to the tables."""
        scatter_entries(address + COUNT_BYTES, address, capacity, self.memory, self.stream)
