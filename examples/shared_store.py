"""Two processes share what one has computed: a store of blocks outlives the first and serves the second.

    python examples/shared_store.py [folder | redis://HOST:PORT | s3://BUCKET]

The first process computes the keys and values of some prompts, whose blocks go to host memory and from there to the
store. Then it ends. The second process finds them: it computes only the tokens that the store cannot have. Every value
that is reused is compared. Without an argument the store is a temporary folder, handed from the first to the second.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import numpy as np
from numpy.typing import NDArray

from pagecore import AttentionSpec, PagedKVCache
from pagecore.tiers import BlockStore, Deadline, DiskStore, Fingerprint, Guard, HostTier, ObjectStore, RespStore, Tiers

BLOCK, HEADS, DIM = 16, 2, 64
SYSTEM = np.arange(1000, 1160, dtype=np.int32)  # a system prompt that all questions share
QUESTIONS = [np.concatenate([SYSTEM, np.arange(start, start + 90, dtype=np.int32)]) for start in (0, 200, 400)]


def projected(tokens: NDArray[np.int32], seed: int) -> NDArray[np.float32]:
    """Return values in place of a model's: of each token that depend on all tokens before it, [tokens, HEADS, DIM]."""
    weights = np.random.default_rng(seed).standard_normal(HEADS * DIM).astype(np.float32)
    running = np.cumsum(tokens.astype(np.int64) * (np.arange(len(tokens)) + 1)) % 1009
    return (running[:, None].astype(np.float32) * weights).reshape(-1, HEADS, DIM)


def open_store(target: str, fingerprint: Fingerprint) -> BlockStore:
    """Open the store that `target` names."""
    if target.startswith(("redis://", "unix://")):
        return RespStore(target, fingerprint=fingerprint)
    if "://" in target:
        return ObjectStore(target, fingerprint=fingerprint)
    return DiskStore(target, fingerprint=fingerprint, max_bytes=16 << 20)


def serve(target: str, name: str) -> int:
    """Serve the questions; return the number of tokens that were computed."""
    cache = PagedKVCache(AttentionSpec(HEADS, DIM, dtype="float32"), num_blocks=33, block_size=BLOCK)
    fingerprint = Fingerprint.of(cache, model="shared-store-example")
    # Patient, so that a busy machine computes nothing twice; a store without a guard gets one of 50 ms.
    store = Guard(open_store(target, fingerprint), deadline=Deadline(10.0))
    computed = 0
    with Tiers(cache, HostTier(cache, num_blocks=65), [store], fingerprint=fingerprint, min_tokens=BLOCK) as tiers:
        for tokens in QUESTIONS:
            # In an engine the request goes out when the prompt arrives, and poll() is called between steps.
            request = tiers.wait(tiers.request(tokens, deadline=10.0))
            with tiers.add_sequence(tokens) as sequence:
                cached = sequence.num_cached_tokens
                request.release()
                verify(cache, sequence.row, tokens, cached)
                batch = cache.prepare([sequence], len(tokens) - cached)
                cache.write(0, projected(tokens, 1)[cached:], projected(tokens, 2)[cached:], batch)
                cache.commit(batch)
            computed += len(tokens) - cached
            print(f"{name}: {cached:3} of {len(tokens)} tokens reused, from stores {request.loaded_tokens}")
        tiers.drain(30.0)
    return computed


def verify(cache: PagedKVCache, row: int, tokens: NDArray[np.int32], count: int) -> None:
    """Compare the reused keys and values with those that the model would compute."""
    places = np.arange(count)
    slots = cache.block_table().numpy()[row][places // BLOCK], places % BLOCK
    np.testing.assert_array_equal(cache.key(0).numpy()[slots], projected(tokens, 1)[:count])
    np.testing.assert_array_equal(cache.value(0).numpy()[slots], projected(tokens, 2)[:count])


def main() -> None:
    """Run both processes."""
    if sys.argv[1:2] == ["--serve"]:
        print("computed", serve(sys.argv[2], sys.argv[3]))
        return
    with tempfile.TemporaryDirectory() as folder:
        target = sys.argv[1] if len(sys.argv) > 1 else folder
        computed = []
        for name in ("first", "second"):
            command = [sys.executable, __file__, "--serve", target, name]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(output, end="")
            computed.append(int(output.split()[-1]))
    prompts = sum(map(len, QUESTIONS))
    reused = prompts - computed[1]
    print(f"the second process reused {reused} of {prompts} tokens; every reused value was verified")


if __name__ == "__main__":
    main()
