import numpy as np
from numpy.typing import NDArray

SECRET_BYTES: int

def chain_xxh3(
    header: bytes,
    space: bytes,
    secret: bytes,
    ids: NDArray[np.int32],
    block_size: int,
    span_blocks: NDArray[np.int64],
    span_ends: NDArray[np.int64],
    span_bytes: bytes,
) -> NDArray[np.uint8]: ...
def payload_sums(keys: NDArray[np.uint8], pieces: NDArray[np.uint64]) -> NDArray[np.uint64]: ...
