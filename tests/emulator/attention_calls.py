"""Direct launches of the attention kernels: their structs, and schedules with arbitrary splits."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from tests.cuda.kit import Kit
from tests.emulator import build
from tests.ops.cases import Case, assert_lse_close, assert_output_close
from tests.reference import attention as reference

FLOATS = {"float32": (0, "float"), "float16": (1, "pc_half"), "bfloat16": (2, "pc_bfloat16")}
PROMPT_ROWS = 128  # kPromptRows of abi/plan.h
FAR_ROWS, FAR_BYTES = 2**26, 2**33  # distance of the partial rows, and of the mask, from their address
ITEM = np.dtype([(name, np.int32) for name in (
    "sequence", "query_begin", "query_count", "key_begin", "key_end", "partial", "split", "num_splits"
)])  # fmt: skip


def struct(name: str, fields: str) -> type[ctypes.Structure]:
    kinds = {"address": ctypes.c_uint64, "int64": ctypes.c_int64, "int32": ctypes.c_int32, "float": ctypes.c_float}
    kinds["int16"] = ctypes.c_int16
    found = [line.split() for line in fields.strip().split(";") if line.strip()]
    members = [(field, STRUCTS[kind] if kind in STRUCTS else kinds[kind]) for kind, field in found]
    STRUCTS[name] = type(name, (ctypes.Structure,), {"_fields_": members})
    return STRUCTS[name]


STRUCTS: dict[str, type[ctypes.Structure]] = {}
Rows = struct("Rows", "address data; int64 token_stride; int64 head_stride")
Cache = struct("Cache", "address data; int64 block_stride; int64 token_stride; int64 head_stride")
Indices = struct("Indices", "address data; int64 stride; int32 size; int32 wide")
Table = struct("Table", "address data; int64 row_stride; int32 num_rows; int32 width; int32 wide; int32 pad")
Schedule = struct("Schedule", "address items; address first_item")
Selection = struct(
    "Selection",
    """address entries; int64 sequence_stride; int64 head_stride; address counts; int64 counts_sequence_stride;
    int64 counts_head_stride; int32 width; int32 unit; int32 unit_shift; int32 wide; int32 counts_wide; int32 pad""",
)
Tree = struct("Tree", "Indices positions; int32 words; int32 pad")
Params = struct(
    "Params",
    """Rows query; Rows out; Cache key; Cache value; Table table; Indices rows; Indices seq_lens;
    Indices cu_query_lens; Schedule schedule; address lse; int64 lse_token_stride; int64 lse_head_stride;
    address partial_out; address partial_lse; address counters; int64 num_partial_rows; address sinks;
    address alibi_slopes; address key_scale; address value_scale; address query_scale;
    address out_scale; address mask; address mask_starts; int64 mask_size;
    int32 num_tokens; int32 num_sequences; int32 num_query_heads; int32 num_kv_heads; int32 head_dim; int32 value_dim;
    int32 num_blocks; int32 block_size; int32 block_shift; int32 causal; int32 window_left; int32 window_right;
    int32 fold_tokens; int32 query_type; int32 key_type; int32 value_type; float scale; float softcap;
    int32 sink_tokens; int16 key_scale_stride; int16 value_scale_stride; int32 out_type; float out_factor;
    int32 query_scale_stride; int32 pad; Selection selection; Tree tree""",
)
assert ctypes.sizeof(Params) == 560


class Shape(ctypes.Structure):
    """PcLaunchShape of shapes/attention.h."""

    _fields_ = [
        (name, ctypes.c_int) for name in ("threads", "shared_bytes", "blocks_per_sm", "max_rows", "tile_tokens")
    ]


class Dims(ctypes.Structure):
    """PcMatrixDims of shapes/attention.h."""

    _fields_ = [("key", ctypes.c_int), ("value", ctypes.c_int)]


@functools.cache
def launch_shapes() -> ctypes.CDLL:
    """Compile the kernels' header for the host, and load it."""
    header = (build.SOURCES / "shapes" / "attention.h").read_text()
    unit = build.FOLDER / f"attention_shape-{build.key_of(header)}.cpp"
    path = unit.with_suffix(".so")
    if not path.exists():
        build.FOLDER.mkdir(parents=True, exist_ok=True)
        unit.write_text(
            '#include "cuda_src/shapes/attention.h"\n'
            'extern "C" PcLaunchShape decode(int key, int value) { return pc_decode_shape(key, value); }\n'
            'extern "C" PcMatrixDims dims(int head, int value) { return pc_matrix_dims(head, value); }\n'
            'extern "C" PcLaunchShape general(int dim) { return pc_general_shape(dim); }\n'
        )
        build.compile_library(path, [f"-I{build.ROOT}", str(unit)])
    library = ctypes.CDLL(str(path))
    library.decode.restype = library.general.restype = Shape
    library.dims.restype = Dims
    return library


def shape_of(name: str, rows: int | None = None) -> Shape:
    """Return the launch shape of an instance; `rows` limits the rows of an item of general."""
    entry, _, text = name.rstrip(">").partition("<")
    arguments = text.split(",")
    dims = (
        [int(arguments[1]), int(arguments[-1 if len(arguments) == 4 else 1])]
        if entry == "decode"
        else [int(arguments[0])]
    )
    shape: Shape = getattr(launch_shapes(), entry)(*dims)
    shape.max_rows = shape.max_rows if rows is None else rows
    return shape


def decode_name(case: Case, kind: str = "Plain") -> str:
    dims = launch_shapes().dims(case.query.shape[2], case.value_cache.shape[3])
    value = "" if dims.key == dims.value else f",{dims.value}"
    return f"decode<{FLOATS[str(case.query.dtype)][1]},{dims.key},{kind}{value}>"


def general_name(case: Case, kind: str = "Plain") -> str:
    dim = max(case.query.shape[2], case.value_cache.shape[3])
    return f"general<{next(n for n in (64, 128, 256, 512) if n >= dim)},{kind}>"


def query_ranges(case: Case) -> list[tuple[int, int]]:
    return reference.query_ranges(len(case.seq_lens), case.options.get("cu_query_lens"))


def make_items(case: Case, query_tile: int, split: int) -> np.ndarray[Any, Any]:
    """Return items of `query_tile` queries, with keys cut at multiples of `split` (0: not cut)."""
    kinds = {name: case.options[name] for name in ("causal", "window", "chunk") if name in case.options}
    items: list[tuple[int, ...]] = []
    partial = 0
    for i, (first, end) in enumerate(query_ranges(case)):
        attended = reference.allowed(end - first, int(case.seq_lens[i]), **kinds)
        for begin in range(first, end, query_tile):
            count = min(query_tile, end - begin)
            keys = np.flatnonzero(attended[begin - first : begin - first + count].any(axis=0))
            low, high = (int(keys[0]), int(keys[-1]) + 1) if keys.size else (0, 0)
            cuts = [low, *(j for j in range(low + 1, high) if split and j % split == 0), high]
            parts = len(cuts) - 1
            for s in range(parts):
                items.append((i, begin, count, cuts[s], cuts[s + 1], partial if parts > 1 else -1, s, parts))
                partial += count if parts > 1 else 0
    return np.array(items, dtype=ITEM)


def window_of(window: Any) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if isinstance(window, tuple):
        return tuple(-1 if w is None else min(int(w), 2**31 - 1) for w in window)  # type: ignore[return-value]
    return min(window - 1, 2**31 - 1), -1


class Call:
    """One launch of an attention kernel for a case, into poisoned outputs."""

    def __init__(
        self,
        kit: Kit,
        case: Case,
        name: str,
        *,
        rows: int | None = None,
        workers: int = 3,
        split: int = 0,
        fold: int = 0,
        reorder: int | None = None,
        far: int = 0,
    ) -> None:
        self.kit, self.case, self.name = kit, case, name
        shape = self.shape = shape_of(name, rows)
        num_tokens, num_heads, head_dim = case.query.shape
        num_blocks, block_size, num_kv_heads, value_dim = case.value_cache.shape
        group = num_heads // num_kv_heads
        self.chunks = -(-group // shape.max_rows)
        items = make_items(case, max(1, shape.max_rows // group), split)
        if reorder is not None:
            items = np.random.default_rng(reorder).permutation(items)
        first_item = np.linspace(0, len(items), workers + 1).astype(np.int32)
        num_partial = int(sum(item["query_count"] for item in items if item["num_splits"] > 1))
        num_partial += workers * max(1, PROMPT_ROWS // group) if fold else 0  # rows in which each worker folds
        self.workers = workers
        self._kept: list[Any] = []
        p = self.params = Params()
        dtype = str(case.query.dtype)
        self.out = self._keep(kit.empty((num_tokens, num_heads, value_dim), dtype))
        self.lse = self._keep(kit.empty((num_tokens, num_heads)))
        self._rows(p.query, self._put(case.query))
        self._rows(p.out, self.out)
        for plane, cache in ((p.key, case.key_cache), (p.value, case.value_cache)):
            tensor = self._put(cache)
            plane.data = tensor.pointer
            plane.block_stride, plane.token_stride, plane.head_stride = (
                s // cache.itemsize for s in tensor.strides[:3]
            )
        table = self._put(case.block_table)
        p.table.data, p.table.row_stride = table.pointer, table.strides[0] // case.block_table.itemsize
        p.table.num_rows, p.table.width = case.block_table.shape
        p.table.wide = int(case.block_table.itemsize == 8)
        self._indices(p.seq_lens, case.seq_lens)
        for array in ("rows", "cu_query_lens"):
            if array in case.options:
                self._indices(getattr(p, array), case.options[array])
        self.far = far
        if far:
            items["partial"][items["num_splits"] > 1] += FAR_ROWS
        p.schedule.items = self._put(items.view(np.int32) if len(items) else np.zeros(8, np.int32)).pointer
        p.schedule.first_item = self._put(first_item).pointer
        p.lse, p.lse_token_stride, p.lse_head_stride = self.lse.pointer, num_heads, 1
        p.partial_out = self._keep(kit.empty((max(num_partial, 1), num_heads, value_dim))).pointer
        p.partial_lse = self._keep(kit.empty((max(num_partial, 1), num_heads))).pointer
        self.counters = self._put(np.zeros((max(num_partial, 1), num_kv_heads, self.chunks), np.int32))
        p.counters, p.num_partial_rows = self.counters.pointer, num_partial
        self._options(num_heads, num_kv_heads)
        p.num_tokens, p.num_sequences = num_tokens, len(case.seq_lens)
        p.num_query_heads, p.num_kv_heads, p.head_dim, p.value_dim = num_heads, num_kv_heads, head_dim, value_dim
        p.num_blocks, p.block_size = num_blocks, block_size
        p.block_shift = block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1
        p.fold_tokens = fold
        self._move_far(far)
        p.query_type = p.out_type = FLOATS[dtype][0]
        p.out_factor = 1.0
        p.key_type, p.value_type = FLOATS[str(case.key_cache.dtype)][0], FLOATS[str(case.value_cache.dtype)][0]

    def _move_far(self, blocks: int) -> None:
        """Move block 0 to `blocks` blocks before the cache's memory, as if that were the end of a large pool.

        Partial rows and the mask move by FAR_ROWS and FAR_BYTES.
        """
        p = self.params
        if not blocks:
            return
        for plane, cache in ((p.key, self.case.key_cache), (p.value, self.case.value_cache)):
            plane.data = (plane.data - blocks * plane.block_stride * cache.itemsize) % 2**64
        p.num_blocks += blocks
        p.num_partial_rows += FAR_ROWS
        p.partial_out -= 4 * FAR_ROWS * p.num_query_heads * p.value_dim
        p.partial_lse -= 4 * FAR_ROWS * p.num_query_heads
        p.counters -= 4 * FAR_ROWS * p.num_kv_heads * self.chunks
        p.mask -= FAR_BYTES
        p.mask_size += FAR_BYTES

    def _options(self, num_heads: int, num_kv_heads: int) -> None:
        p, options = self.params, self.case.options
        p.causal = int(options.get("causal", True))
        p.window_left, p.window_right = window_of(options.get("window"))
        scale = options.get("scale")
        p.scale = self.case.query.shape[2] ** -0.5 if scale is None else scale
        p.softcap = options.get("softcap", 0.0)
        p.key_scale_stride = p.value_scale_stride = 1
        sizes = {"sinks": num_heads, "alibi_slopes": num_heads, "key_scale": num_kv_heads, "value_scale": num_kv_heads}
        for name, size in sizes.items():
            if options.get(name) is not None:
                numbers = np.broadcast_to(np.asarray(options[name], np.float32), size).copy()
                setattr(p, name, self._put(numbers).pointer)
        if options.get("mask") is not None:
            mask = np.asarray(options["mask"]).astype(np.uint8)
            sizes_of = [(e - b) * int(n) for (b, e), n in zip(query_ranges(self.case), self.case.seq_lens, strict=True)]
            p.mask, p.mask_size = self._put(mask).pointer, mask.size
            starts = np.cumsum([FAR_BYTES if self.far else 0, *sizes_of])[:-1]
            p.mask_starts = self._put(starts.astype(np.int64)).pointer

    def run(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        grid = (self.workers, self.params.num_kv_heads, self.chunks)
        self.kit.runtime.run(self.name, grid, self.shape.threads, self.shape.shared_bytes, self.params)
        assert (self.kit.get(self.counters) == 0).all()
        return self.kit.get(self.out), self.kit.get(self.lse)

    def check(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Run the kernel, compare with the oracle, and return output and lse."""
        out, lse = self.run()
        expected = self.case.expect()
        assert_output_close(out, expected[0], self.case.magnitude())
        assert_lse_close(lse, expected[1], str(self.case.query.dtype))
        return out, lse

    def _keep(self, tensor: Any) -> Any:
        self._kept.append(tensor)
        return tensor

    def _put(self, array: Any) -> Any:
        return self._keep(self.kit.put(array))

    def _rows(self, rows: Any, tensor: Any) -> None:
        rows.data = tensor.pointer
        rows.token_stride, rows.head_stride = (s // tensor.itemsize for s in tensor.strides[:2])

    def _indices(self, indices: Any, array: Any) -> None:
        array = np.asarray(array)
        tensor = self._put(array)
        indices.data, indices.stride = tensor.pointer, tensor.strides[0] // array.itemsize
        indices.size, indices.wide = array.size, int(array.itemsize == 8)
