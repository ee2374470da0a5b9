"""Files that hold the blocks of one group, each a bounded number of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import InvalidBlock, NotEnoughMemory, UnsupportedOption
from pagecore.storage import KVLayout
from pagecore.storage.checks import require_int, shown
from pagecore.storage.pools.state_pool import slot_numbers

# Errors of a file system without room.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class DiskFiles:
    """Raw files for the blocks of a layout: file i holds blocks ``[i * max, (i + 1) * max)``, one after the other.

    The files have neither a header nor sums: they are memory for an engine that keeps its own index. A `DiskStore`
    keeps blocks by content, across restarts.

    Parameters
    ----------
    layout : KVLayout
        Bound layout with B as the outermost axis and one buffer, such as that of a pool in host memory.
    folder : str or Path
    max_blocks_per_file : int
    name : str
        Beginning of the files' names.

    Raises
    ------
    UnsupportedOption
        A layout whose blocks are not one run of bytes each.
    ShapeError
        A layout without sizes, or a number below 1.

    Examples
    --------
    >>> from pagecore import AttentionSpec, KVLayout
    >>> from pagecore.tiers.engine import DiskFiles
    >>> layout = KVLayout("blockwise").bind(AttentionSpec(8, 128), 2, 70_000, 16)
    >>> DiskFiles(layout, "/data/blocks").file_blocks
    (32000, 32000, 6000)
    """

    layout: KVLayout
    folder: str | Path
    max_blocks_per_file: int = 32_000
    name: str = "blocks"

    def __post_init__(self) -> None:
        most = require_int("max_blocks_per_file", self.max_blocks_per_file)
        object.__setattr__(self, "max_blocks_per_file", most)
        object.__setattr__(self, "folder", Path(self.folder))
        if not isinstance(self.layout, KVLayout):
            raise UnsupportedOption(f"layout is {shown(self.layout)}; expected a bound KVLayout")
        self.layout.plane_layout(0)  # raises ShapeError without sizes
        if self.layout.num_buffers != 1 or self.layout.axes[0] != "B":
            raise UnsupportedOption(
                f"layout {self.layout.order!r} spreads a block over several runs of bytes; files need 'blockwise'"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of all files."""
        return self.layout.num_blocks or 0

    @property
    def file_blocks(self) -> tuple[int, ...]:
        """Blocks of each file."""
        most = self.max_blocks_per_file
        return tuple(min(most, self.num_blocks - begin) for begin in range(0, self.num_blocks, most))

    @property
    def file_nbytes(self) -> tuple[int, ...]:
        """Bytes of each file: its blocks times the stride between blocks."""
        return tuple(blocks * self.layout.block_stride for blocks in self.file_blocks)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Path of each file."""
        return tuple(Path(self.folder) / f"{self.name}.{number:04d}" for number in range(len(self.file_blocks)))

    def create(self) -> None:
        """Make the files, with their bytes allocated; files of the right size are kept as they are.

        Raises
        ------
        NotEnoughMemory
            The file system has not enough room.
        UnsupportedOption
            A file of another size exists, another process is making the files, or the folder cannot be written. After
            every error no new file exists.
        """
        made: list[Path] = []
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            for path, nbytes in zip(self.paths, self.file_nbytes, strict=True):
                if path.exists():
                    _check_size(path, nbytes)
                    continue
                _allocate(path, nbytes, made)
        except BaseException as error:
            for path in made:
                path.unlink(missing_ok=True)
            if not isinstance(error, OSError) or isinstance(error, UnsupportedOption | NotEnoughMemory):
                raise
            if error.errno in _FULL:
                total = sum(self.file_nbytes)
                raise NotEnoughMemory(
                    f"{self.folder} has no room for {total:,} bytes: {error}; use fewer blocks, or another folder"
                ) from error
            raise UnsupportedOption(f"{self.folder} cannot be written: {error}; use another folder") from error

    def pieces(self, blocks: Any) -> NDArray[np.int64]:
        """Return file, offset and bytes of each block, without padding: int64 ``[n, 3]``.

        Raises
        ------
        InvalidBlock, ShapeError, UnsupportedDtype
            Blocks that the files do not have, or that are not integers.
        """
        numbers = checked_blocks(blocks, self.num_blocks)
        files, places = np.divmod(numbers, self.max_blocks_per_file)
        sizes = np.full_like(numbers, self.layout.block_nbytes)
        return np.stack([files, places * self.layout.block_stride, sizes], axis=1)


def checked_blocks(blocks: Any, num_blocks: int) -> NDArray[np.int64]:
    """Return block ids as int64 ``[n]``; raise InvalidBlock if one is outside of ``[0, num_blocks)``."""
    numbers = slot_numbers("blocks", blocks)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < num_blocks:
        wrong = numbers[(numbers < 0) | (numbers >= num_blocks)][0]
        raise InvalidBlock(f"block {wrong} is outside of the {num_blocks} blocks, 0 to {num_blocks - 1}")
    return numbers


def _check_size(path: Path, nbytes: int) -> None:
    if (has := path.stat().st_size) != nbytes:
        raise UnsupportedOption(
            f"{path} has {has:,} bytes; this layout needs {nbytes:,}: it is of another layout, use another folder or "
            "name, or delete it"
        )


def _allocate(path: Path, nbytes: int, made: list[Path]) -> None:
    """Make a file, and list it once it exists; refuse a file that another process has made since the caller looked."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UnsupportedOption(
            f"{path} was just made by another process, which is making these files; call create again when it is done"
        ) from error
    made.append(path)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def same_block(one: KVLayout, other: KVLayout) -> bool:
    """Return True if a block has the same bytes at the same places in both layouts."""
    return _block_of(one) == _block_of(other)


def _block_of(layout: KVLayout) -> Sequence[object]:
    alone = layout.bind(layout.planes, layout.num_layers or 1, 1, layout.block_size or 1)
    places = [alone.plane_layout(index) for index in range(len(alone.planes))]
    return [alone.planes, alone.num_layers, alone.block_size, alone.block_nbytes, places]
