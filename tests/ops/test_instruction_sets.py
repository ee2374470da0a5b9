"""Every instruction set of this machine keeps the bounds of attention and can be selected by name."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pagecore import errors, ops
from pagecore.ops.cpu import _cpu
from tests.capabilities import missing
from tests.ops.cases import DTYPES, Shape, check_case, empty_cache, make_case, random_mask
from tests.ops.instruction_sets import ISAS, by_case, instruction_set, on_every_isa
from tests.reference import attention as reference
from tests.reference import blocks
from tests.thinning import in_turn
from tests.together import together

pytestmark = pytest.mark.slow

MIXED = {"seq_lens": (70, 33, 1, 16, 300, 0), "query_lens": (7, 1, 1, 16, 40, 2)}
DECODE = {"seq_lens": (70, 33, 1, 300, 0)}


@together("query_dtype", DTYPES)
@together("cache_dtype", DTYPES)
@together("lens", [MIXED, DECODE])
@on_every_isa
def test_attention_in_every_dtype(query_dtype, cache_dtype, lens):
    check_case(Shape(query_dtype=query_dtype, cache_dtype=cache_dtype, **lens))


@together("layout", ["NHD", "HND"])
@together("dims", [(33, 33), (80, 17), (128, 64), (256, 100), (5, 9)])
@together("heads", [(6, 1), (5, 5), (16, 2)])
@on_every_isa
def test_attention_in_every_shape(layout, dims, heads):
    check_case(Shape(layout=layout, dims=dims, heads=heads, block_size=5, **MIXED))
    check_case(Shape(layout=layout, dims=dims, heads=heads, block_size=5, **DECODE))


@together("lens", [MIXED, DECODE])
@together("masked", [False, True])
@on_every_isa
def test_attention_with_every_option(lens, masked):
    options = {"window": (30, 3), "causal": False, "softcap": 5.0, "key_scale": [0.5, 2.0], "value_scale": 0.7}
    options |= {"sinks": np.asarray([1.5, -2, 4, 0]), "alibi_slopes": np.asarray([0.5, 0.25, 0.125, 0.0625])}
    if masked:
        options["mask"] = random_mask(Shape(**lens))
    check_case(Shape(**lens), **options)


@together("dims", [(33, 17), (16, 80), (64, 64)])
@together("dtype", ["float32", "bfloat16"])
@together("query_len", [1, 5, 40])
@on_every_isa
def test_calls_do_not_depend_on_earlier_calls(dims, dtype, query_len):
    bad = make_case(Shape(seq_lens=(70,), query_lens=(40,), dims=(256, 256), query_dtype=dtype, cache_dtype=dtype))
    for array in (bad.query, bad.key_cache, bad.value_cache):
        array[...] = np.nan
    case = make_case(Shape((70,), (query_len,), dims=dims, query_dtype=dtype, cache_dtype=dtype))
    assert np.isnan(bad.run()).all()
    case.check()


@together("dtype", DTYPES)
@together("cache_dtype", DTYPES)
@on_every_isa
def test_writes_cast_to_the_same_bits(dtype, cache_dtype):
    rng = np.random.default_rng(0)
    new = (rng.standard_normal((40, 3, 37)) * 10.0 ** rng.integers(-9, 5, (40, 3, 37))).astype(DTYPES[dtype])
    cache, expected = np.zeros((2, 10, 4, 3, 37), DTYPES[cache_dtype]), np.zeros((10, 4, 3, 37), DTYPES[cache_dtype])
    slots = rng.permutation(40)
    with np.errstate(over="ignore"):
        reference.write_kv(new, expected, slots)
    ops.write_kv(new, new, *cache, slots)
    assert cache[0].tobytes() == expected.tobytes()
    assert cache[1].tobytes() == expected.tobytes()


@functools.lru_cache(2)
def hard_cache(layout: str, cache_dtype: str, count: int) -> np.ndarray:
    """Return a read-only cache of numbers of all magnitudes, with rows of 37."""
    rng = np.random.default_rng(0)
    cache = empty_cache(layout, (count + 1, 16, 60, 37), DTYPES[cache_dtype])
    numbers = (rng.standard_normal(5000) * 10.0 ** rng.integers(-9, 5, 5000)).astype(np.float32)
    with np.errstate(over="ignore"):
        cache[...] = numbers.astype(cache.dtype)[rng.integers(0, 5000, cache.shape, dtype=np.uint16)]
    cache.flags.writeable = False
    return cache


@functools.lru_cache(1)
def hard_rows(cache_dtype: str, count: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an order of blocks of `hard_cache`, the ordered blocks in a dtype, and these in that of the cache."""
    cache = hard_cache("NHD", cache_dtype, count)  # the numbers are those of any layout
    order = np.random.default_rng(1).permutation(np.arange(1, count + 1))
    packed = blocks.cast(cache[order], DTYPES[dtype])
    return order, packed, blocks.cast(packed, cache.dtype)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(*(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other)))


@together(
    ("cache_dtype", "count", "dtype", "turns"), by_case(in_turn(DTYPES, [3, 124], DTYPES, ISAS, over=[["NHD", "HND"]]))
)
def test_blocks_are_gathered_scattered_and_transferred_to_the_same_bits(dtype, cache_dtype, count, turns):
    """Rows of 37 numbers start and end anywhere in a line; 124 blocks exceed the caches."""
    for isa, layout in turns:
        with instruction_set(isa):
            check_moves(layout, cache_dtype, count, dtype)


def check_moves(layout: str, cache_dtype: str, count: int, dtype: str) -> None:
    cache = hard_cache(layout, cache_dtype, count)
    shape = cache.shape
    order, expected, expected_back = hard_rows(cache_dtype, count, dtype)
    packed = np.full((count * 16, 60, 37), np.nan, DTYPES[dtype])
    ops.gather_blocks(cache, order[None], [count * 16], out=packed)
    assert same_bits(packed, expected)

    back = np.zeros(shape, cache.dtype)
    ops.scatter_blocks(packed, back, order[None], [count * 16])
    assert same_bits(back[order], expected_back)
    assert not back[0].any()

    other = np.zeros(shape, DTYPES[dtype])
    ops.transfer_blocks(cache, other, np.stack([order, np.arange(1, count + 1)], axis=1))
    assert same_bits(other[1:], expected)


def fastest(isas: Sequence[str]) -> str:
    """Return the widest instruction set, but the next for pairs of bfloat16 on a processor of Intel."""
    cpuinfo = Path("/proc/cpuinfo")
    intel = cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text()
    return isas[1] if intel and isas[0] == "x86-64-v4-bf16" and len(isas) > 1 else isas[0]


def test_the_fastest_instruction_set_is_the_default():
    before = _cpu.isa()
    default = _cpu.set_isa(None)
    _cpu.set_isa(before)
    assert default == os.environ.get("PAGECORE_ISA", fastest(ISAS))


# Refuses arch_prctl(ARCH_REQ_XCOMP_PERM, ..) from here on, by a filter of system calls.
REFUSE_TILES = """
import ctypes, struct
load, equals, give = 0x20, 0x15, 0x06
code = [(load, 0, 0, 0), (equals, 0, 3, 158), (load, 0, 0, 16), (equals, 0, 1, 0x1023)]
code += [(give, 0, 0, 0x50001), (give, 0, 0, 0x7fff0000)]
filter = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filter)))
prctl, null = ctypes.CDLL(None).prctl, ctypes.c_void_p(0)
if prctl(38, 1, null, null, null) or prctl(22, 2, program, null, null):
    raise SystemExit(3)
"""


def test_the_default_of_a_process_that_may_not_use_tiles():
    if "x86-64-v4-amx" not in ISAS:
        missing("AMX", "there are no tiles to refuse")
    code = REFUSE_TILES + "from pagecore.ops.cpu import _cpu; print(_cpu.isa(), *_cpu.available_isas())"
    environment = {name: value for name, value in os.environ.items() if name != "PAGECORE_ISA"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        missing("seccomp", "the system has no filters of system calls")
    assert done.returncode == 0, done.stderr
    default, *isas = done.stdout.split()
    assert isas == [isa for isa in ISAS if isa != "x86-64-v4-amx"]
    assert default == fastest(isas)


@together("name", ["", "v5", "V3", "v3 ", "\u00e9", 3, b"v3"])
def test_an_unknown_instruction_set_is_refused_and_changes_nothing(name):
    before = _cpu.isa()
    with pytest.raises(errors.UnsupportedOption):
        _cpu.set_isa(name)
    assert _cpu.isa() == before


@together("name", ISAS)
def test_the_environment_chooses_the_instruction_set(name):
    code = "from pagecore.ops.cpu import _cpu; print(_cpu.isa())"
    environment = os.environ | {"PAGECORE_ISA": name}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == name


FIRST_CALLS = """
import numpy as np
import pagecore

cache, codes = np.zeros((3, 1, 1, 1 << 20), np.float32), np.zeros((3, 1, 1, 1 << 20), np.int8)
scales = np.zeros((3, 1, 1, 1), np.float32)
for call in (
    lambda: pagecore.paged_attention(cache[0], cache, cache, [[1]], [1]),
    lambda: pagecore.quantize(np.zeros((2, 576), np.float32), "fp8_ds_mla"),
    lambda: pagecore.transfer_blocks(cache, codes, [(1, 2)], target_scales=scales),
    lambda: pagecore.copy_blocks(cache[..., :8].copy(), [(1, 2)]),
):
    try:
        call()
    except pagecore.UnsupportedOption as error:
        assert "v99" in str(error), error
        print("refused")
"""


def test_an_unknown_instruction_set_in_the_environment_is_an_error_that_names_it():
    environment = os.environ | {"PAGECORE_ISA": "v99"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"] * 4
