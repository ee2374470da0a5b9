"""Slot-mapped writes, block moves and checkpoints of states on a GPU, against a device copy of the bytes and torch.

With fewer than 2,048 tokens each token is in a different block, as in decode steps; others fill whole scattered blocks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pagecore
from bench.gpu.controls import optional_control
from bench.gpu.device import Call, Gpu, clock, copies, described_gpu, in_turn, num_sets
from bench.harness.arrays import DTYPES
from bench.harness.runner import Bench, Job
from bench.harness.targets import GPU_MOVE_RATIO_MIN
from pagecore.storage.state_shapes import delta_planes

CLOCK = clock
HEADS, DIM, BLOCK = 8, 128, 16
COPY, INDEX = "device copy of the same bytes", "torch index_copy_"
CASTS = (("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16"))
WHOLE_BLOCKS = 2048
MIB = 1 << 20


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run writes of 64 to 65,536 tokens, copies, gathers and scatters of 16 and 256 MiB, and checkpoints of states."""
    run_on(bench, described_gpu(bench))


def run_on(bench: Bench, gpu: Gpu) -> None:
    """Run all figures on one device."""
    run_writes(bench, gpu)
    run_moves(bench, gpu)
    run_states(bench, gpu)


def run_writes(bench: Bench, gpu: Gpu) -> None:
    """Run write_kv of 64 to 65,536 tokens."""
    for (source, dtype), tokens in product(CASTS, bench.pick((64, 512, 2048, 8192, 65536), (64, 2048))):
        with bench.case(_write_title(source, dtype, tokens)):
            _write(bench, gpu, source, dtype, tokens)


def run_moves(bench: Bench, gpu: Gpu) -> None:
    """Run copy_blocks, gather_blocks and scatter_blocks of 16 and 256 MiB."""
    for mebibytes in bench.pick((16, 256), (1,)):
        with bench.case(f"moves {mebibytes} MiB"):
            _moves(bench, gpu, mebibytes)


def run_states(bench: Bench, gpu: Gpu) -> None:
    """Run int8 checkpoints of the states of Qwen3-Next: 36 layers of 32 matrices of 128 x 128, in float32."""
    for slots in bench.pick((1, 8), (1,)):
        _states(bench, gpu, bench.pick(36, 1), slots)


def _write_title(source: str, dtype: str, tokens: int) -> str:
    dtypes = dtype if source == dtype else f"{source} -> {dtype}"
    return f"write {tokens:>5}, {HEADS} x {DIM}, {dtypes}"


def _write(bench: Bench, gpu: Gpu, source: str, dtype: str, tokens: int) -> None:
    nbytes = 2 * tokens * HEADS * DIM * DTYPES[dtype].itemsize
    sets = bench.pick(num_sets(nbytes), 2)
    new = gpu.random((sets, 2, tokens, HEADS, DIM), source)
    caches = _caches(gpu, -(-sets * tokens // BLOCK) + 1, dtype)
    slots = _slots(gpu, sets, tokens)
    calls = [_write_call(rows, caches, mapping) for rows, mapping in zip(new, slots, strict=True)]
    subject = gpu.job(in_turn(calls))

    def check() -> None:
        for cache in caches:
            cache.fill_(math.nan)
        subject.run()
        for cache, rows in zip(caches, new.transpose(0, 1), strict=True):
            written = cache.flatten(0, 1)[slots.flatten()]
            assert gpu.torch.equal(written, rows.flatten(0, 1).to(cache.dtype)), "a slot does not hold its token"

    controls = {COPY: gpu.job(in_turn(copies(gpu, nbytes, sets)))}
    if source == dtype:
        flat = [cache.flatten(0, 1) for cache in _caches(gpu, len(caches[0]), dtype)]
        pairs = zip(new, slots, strict=True)
        index = [_index_call(rows, flat, mapping) for rows, mapping in pairs]
        controls |= optional_control(bench, gpu, INDEX, lambda: index)
    bench.compare(
        _write_title(source, dtype, tokens),
        subject,
        controls,
        check=check,
        nbytes=nbytes,
        at_least={COPY: GPU_MOVE_RATIO_MIN} if source == dtype and tokens >= WHOLE_BLOCKS else None,
        sizes={"tokens": tokens, "kv_heads": HEADS, "head_dim": DIM, "block_size": BLOCK, "dtype": dtype}
        | {"source_dtype": source, "sets": sets},
    )


def _caches(gpu: Gpu, num_blocks: int, dtype: str) -> list[Any]:
    return [gpu.random((num_blocks, BLOCK, HEADS, DIM), dtype, seed) for seed in range(2)]


def _slots(gpu: Gpu, sets: int, tokens: int) -> Any:
    """Return distinct slots ``[sets, tokens]``."""
    count = sets * tokens
    if tokens >= WHOLE_BLOCKS:
        blocks = 1 + gpu.permutation(count // BLOCK)
        slots = (blocks[:, None] * BLOCK + gpu.torch.arange(BLOCK, device=gpu.place)).flatten()
    else:
        slots = BLOCK + gpu.permutation(count)
    return slots.reshape(sets, tokens)


def _write_call(rows: Any, caches: list[Any], slots: Any) -> Call:
    key, value = rows
    key_cache, value_cache = caches
    return lambda: pagecore.write_kv(key, value, key_cache, value_cache, slots)


def _index_call(rows: Any, caches: list[Any], slots: Any) -> Call:
    def call() -> None:
        for cache, values in zip(caches, rows, strict=True):
            cache.index_copy_(0, slots, values)

    return call


def _moves(bench: Bench, gpu: Gpu, mebibytes: int) -> None:
    """Move bfloat16 blocks within a cache, out of it and into it."""
    nbytes = mebibytes * MIB
    count = nbytes // (BLOCK * HEADS * DIM * 2)
    sets = bench.pick(num_sets(nbytes), 2)
    cache, other = _caches(gpu, 2 * sets * count + 1, "bfloat16")
    ids = (1 + gpu.permutation(2 * sets * count)).to(gpu.torch.int32).reshape(sets, 2, count)
    tokens = gpu.random((sets, count * BLOCK, HEADS, DIM), "bfloat16")
    lens = gpu.torch.tensor([count * BLOCK], dtype=gpu.torch.int32, device=gpu.place)
    parts = list(zip(ids[:, :1], tokens, strict=True))
    control = gpu.job(in_turn(copies(gpu, nbytes, sets)))

    def check_copy(copied: Job) -> None:
        copied.run()
        targets, sources = cache[ids[:, 1].long()], cache[ids[:, 0].long()]
        assert gpu.torch.equal(targets, sources), "a block is not the copy of its source"

    def check_gather(gathered: Job) -> None:
        tokens.fill_(math.nan)
        gathered.run()
        assert gpu.torch.equal(tokens, cache[ids[:, 0].long()].flatten(1, 2)), "a token is not what its block holds"

    def check_scatter(scattered: Job) -> None:
        tokens.normal_(), other.fill_(math.nan)
        scattered.run()
        assert gpu.torch.equal(other[ids[:, 0].long()].flatten(1, 2), tokens), "a block does not hold its tokens"

    for name, calls, check in (
        ("copy_blocks", [_copy_call(cache, pair.T.contiguous()) for pair in ids], check_copy),
        ("gather_blocks", [_gather_call(cache, table, lens, out) for table, out in parts], check_gather),
        ("scatter_blocks", [_scatter_call(rows, other, table, lens) for table, rows in parts], check_scatter),
    ):
        title = f"{name} {mebibytes:>3} MiB, {HEADS} x {DIM} bf16, block {BLOCK}"
        with bench.case(title):
            sizes = {"mebibytes": mebibytes, "kv_heads": HEADS, "head_dim": DIM, "block_size": BLOCK, "sets": sets}
            _compare_with_copy(bench, title, gpu.job(in_turn(calls)), control, check, nbytes, sizes)


def _compare_with_copy(
    bench: Bench,
    title: str,
    subject: Job,
    control: Job,
    check: Callable[[Job], None],
    nbytes: int,
    sizes: dict[str, int],
) -> None:
    """Time a move of bytes against a device copy of these bytes, which is the control."""
    bench.compare(
        title,
        subject,
        {COPY: control},
        check=partial(check, subject),
        nbytes=nbytes,
        at_least={COPY: GPU_MOVE_RATIO_MIN},
        sizes=sizes,
    )


def _copy_call(cache: Any, pairs: Any) -> Call:
    return lambda: pagecore.copy_blocks(cache, pairs, independent=True)


def _gather_call(cache: Any, table: Any, lens: Any, out: Any) -> Call:
    return lambda: pagecore.gather_blocks(cache, table, lens, out=out)


def _scatter_call(values: Any, cache: Any, table: Any, lens: Any) -> Call:
    return lambda: pagecore.scatter_blocks(values, cache, table, lens)


def _states(bench: Bench, gpu: Gpu, layers: int, slots: int) -> None:
    """Quantise and restore slots of a model."""
    spec = pagecore.StateSpec(delta_planes(16, 32, 128, 128)[1:])
    sets = bench.pick(num_sets(layers * slots * spec.nbytes), 1)
    states = pagecore.StatePool(spec, sets * slots + 1, num_layers=layers, device=gpu.name)
    checkpoints = pagecore.CheckpointPool(states, sets * slots + 1)
    planes = [gpu.torch.from_dlpack(plane) for plane in states.planes()]
    ids = [list(range(1 + first, 1 + first + slots)) for first in range(0, sets * slots, slots)]
    given = gpu.random(planes[0].shape, "float32")
    nbytes = layers * slots * (spec.nbytes + checkpoints.bytes_per_slot // layers) // 2  # read and written
    control = gpu.job(in_turn(copies(gpu, nbytes, sets)))
    expected = [gpu.torch.as_tensor(part) for part in pagecore.quantize_state(given[1].cpu())]
    for plane in planes:
        plane.copy_(given)
    for layer in range(layers):
        for name in ("temporal", "temporal_scale"):  # new memory may have the checkpoints of an earlier run
            gpu.torch.from_dlpack(checkpoints.plane(name, layer)).fill_(-1)

    def check_saved(saved: Job) -> None:
        saved.run()
        for layer in range(layers):
            for name, part in zip(("temporal", "temporal_scale"), expected, strict=True):
                kept = gpu.torch.from_dlpack(checkpoints.plane(name, layer))[1].cpu()
                assert gpu.torch.equal(kept, part), "a checkpoint differs from that of the host"

    def check_restored(restored: Job) -> None:
        restored.run()
        wanted = gpu.torch.as_tensor(pagecore.dequantize_state(*expected))
        assert all(gpu.torch.equal(plane[1].cpu(), wanted) for plane in planes), "a state differs from that of the host"

    for name, call, check in (("save", checkpoints.save, check_saved), ("load", checkpoints.load, check_restored)):
        title = f"{name} {slots} int8 checkpoints, {layers} layers"
        with bench.case(title):
            subject = gpu.job(in_turn([_state_call(gpu, call, listed) for listed in ids]))
            sizes = {"layers": layers, "slots": slots, "bytes_per_slot": layers * spec.nbytes, "sets": sets}
            _compare_with_copy(bench, title, subject, control, check, nbytes, sizes)


def _state_call(gpu: Gpu, convert: Any, slots: list[int]) -> Call:
    return lambda: convert(slots, slots, stream=gpu.current_stream())
