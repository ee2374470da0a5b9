"""RequestTable in plain Python: a dictionary of lists."""

from __future__ import annotations

from pagecore.errors import InvalidBlock, InvalidSequence, OutOfRows, ShapeError


class RequestTable:
    """Twin of `pagecore.index.RequestTable`; lists in, lists out."""

    def __init__(self, num_requests: int, max_context: int, dtype: str = "int32"):
        self.num_requests = num_requests
        self.max_context = max_context
        self.bits = int(dtype.removeprefix("int"))
        self.rows: dict[int, list[int]] = {}  # written slots of the used rows

    def row(self, row: int) -> list[int]:
        if row not in self.rows:
            raise InvalidSequence(str(row))
        return self.rows[row]

    def allocate(self, n: int) -> list[int]:
        if n < 0:
            raise ShapeError(str(n))
        if n > self.num_free:
            raise OutOfRows(str(n))
        taken = [row for row in range(self.num_requests) if row not in self.rows][:n]
        self.rows |= {row: [] for row in taken}
        return taken

    def free(self, rows: list[int]) -> None:
        for row in rows:
            self.row(row)
        if len(set(rows)) < len(rows):
            raise InvalidSequence("twice")
        for row in rows:
            del self.rows[row]

    def write(self, rows: list[int], starts: list[int], slots: list[int], counts: list[int] | None = None) -> None:
        if counts is None:
            counts = [len(slots)] if len(rows) == 1 else [1] * len(rows)
        if not len(rows) == len(starts) == len(counts):
            raise ShapeError("uneven")
        for row, start, count in zip(rows, starts, counts, strict=True):
            self.row(row)
            if start < 0 or count < 0 or start + count > self.max_context:
                raise ShapeError(f"{count} from {start}")
        if sum(counts) != len(slots):
            raise ShapeError("slots")
        for slot in slots:
            if not -(2 ** (self.bits - 1)) <= slot < 2 ** (self.bits - 1):
                raise InvalidBlock(str(slot))
        left = list(slots)
        for row, start, count in zip(rows, starts, counts, strict=True):
            for position in range(start, start + count):
                written = self.rows[row]
                written += [0] * (position + 1 - len(written))
                written[position] = left.pop(0)

    def read(self, row: int, *bounds: int) -> list[int]:
        positions = range(*(bounds or (self.length(row),)))
        self.row(row)
        if not 0 <= positions.start <= positions.stop <= self.max_context:
            raise ShapeError(str(positions))
        return [self.entry(row, position) for position in positions]

    def entry(self, row: int, position: int) -> int:
        written = self.rows.get(row, [])
        return written[position] if position < len(written) else 0

    def length(self, row: int) -> int:
        return len(self.row(row))

    @property
    def num_free(self) -> int:
        return self.num_requests - len(self.rows)

    @property
    def num_used(self) -> int:
        return len(self.rows)
