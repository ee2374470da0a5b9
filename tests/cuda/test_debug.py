"""Debug mode: entries of index arrays on a device are checked, with the same errors as on the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors
from tests.cuda.kit import Kit
from tests.cuda.memory import assert_same_memory
from tests.ops.block_cases import random_numbers
from tests.together import together


@pytest.fixture(autouse=True)
def debugging() -> Iterator[None]:
    pagecore.debug(True)
    yield
    pagecore.debug(None)


def lists(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with lengths and offsets as lists on the host, where attention plans them."""
    return {
        name: value.tolist() if name in ("seq_lens", "cu_query_lens") else value for name, value in arguments.items()
    }


def on_device(cuda: Kit, arguments: dict[str, Any]) -> dict[str, Any]:
    def put(x: Any) -> Any:
        if isinstance(x, list):
            return [put(each) for each in x]
        return cuda.put(x) if isinstance(x, np.ndarray) else x

    return {name: put(x) for name, x in arguments.items()}


WRITE: dict[str, Any] = {
    "key": random_numbers((5, 2, 8), "float32"),
    "value": random_numbers((5, 2, 8), "float32", 1),
    "key_cache": np.zeros((6, 4, 2, 8), np.float32),
    "value_cache": np.zeros((6, 4, 2, 8), np.float32),
    "slot_mapping": np.asarray([4, -1, 23, 0, -(2**31)]),
}
GATHER: dict[str, Any] = {
    "cache": random_numbers((9, 4, 2), "float32"),
    "block_table": np.asarray([[3, 0, -5], [8, 2**31 - 1, 1], [1, 2, 3]], np.int32),
    "seq_lens": np.asarray([5, 4, 0], np.int32),
    "out": np.zeros((9, 2), np.float32),
}
SCATTER = {name: x for name, x in GATHER.items() if name != "out"} | {"values": np.ones((9, 2), np.float32)}
TRANSFER: dict[str, Any] = {
    "source_caches": [random_numbers((9, 4, 2), "float32"), random_numbers((8, 4, 3), "float32")],
    "target_caches": [np.zeros((5, 4, 2), np.float32), np.zeros((7, 4, 3), np.float32)],
    "pairs": np.asarray([(1, 4), (7, 1)]),
}
COPY: dict[str, Any] = {
    "caches": [random_numbers((6, 3), "float32"), random_numbers((9, 4, 2), "float32")],
    "pairs": np.asarray([(0, 5), (5, 1), (3, 3)], np.int32),
}
ATTEND: dict[str, Any] = {
    "query": random_numbers((3, 4, 64), "float16"),
    "key_cache": random_numbers((6, 4, 2, 64), "float16"),
    "value_cache": random_numbers((6, 4, 2, 64), "float16", 1),
    "block_table": np.asarray([[1, 2, 3], [4, 5, -1]], np.int32),
    "seq_lens": np.asarray([10, 7], np.int32),
    "cu_query_lens": np.asarray([0, 2, 3], np.int32),
}
LATENT: dict[str, Any] = {
    "query_latent": random_numbers((3, 4, 16), "float32"),
    "query_rope": random_numbers((3, 4, 8), "float32"),
    "latent_cache": random_numbers((6, 4, 24), "float32"),
    "rope_cache": None,
    "scale": 0.2,
    **{name: ATTEND[name] for name in ("block_table", "seq_lens", "cu_query_lens")},
}
MASK = np.ones(27, bool)
# The lists select neither block 6 nor block -1 of the table.
SELECT: dict[str, Any] = ATTEND | {
    "block_table": np.asarray([[1, 2, 6], [4, -1, 0]], np.int32),
    "blocks": np.asarray([[[0, 1], [1, -1]], [[0, -1], [0, -1]]]),
}
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("write_kv", WRITE),
    ("gather_blocks", GATHER),
    ("scatter_blocks", SCATTER),
    ("transfer_blocks", TRANSFER),
    ("copy_blocks", COPY),
    ("paged_attention", ATTEND),
    ("paged_attention", ATTEND | {"mask": MASK}),
    ("paged_attention", lists(ATTEND)),
    ("paged_attention", lists(ATTEND) | {"mask": MASK}),
    ("paged_attention", SELECT),
    ("paged_attention", lists(SELECT)),
    ("latent_attention", LATENT),
    ("latent_attention", lists(LATENT)),
]
WINDOW = {"block_table": np.asarray([[-9, 2, 3], [2**31 - 1, 5, 7]], np.int32), "window": 3}
HIDDEN = np.ones(27, bool)
HIDDEN[20:24] = False  # the first block of the second sequence
BAD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("write_kv", WRITE, {"slot_mapping": np.asarray([4, 24, 25], np.int32)}),
    ("write_kv", WRITE, {"slot_mapping": np.asarray([2**62, 24])[::-1]}),
    ("write_kv", WRITE, {"slot_mapping": np.asarray([0, 1, 2, 3, 2**40])}),
    ("gather_blocks", GATHER, {"block_table": np.asarray([[3, 9], [8, 1], [1, 1]])}),
    ("gather_blocks", GATHER, {"block_table": np.asarray([[3, 0], [-1, 1], [1, 1]], np.int32)}),
    ("gather_blocks", GATHER, {"seq_lens": np.asarray([5, 13, 0])}),
    ("gather_blocks", GATHER, {"seq_lens": np.asarray([9, -1, 0])}),
    ("gather_blocks", GATHER, {"seq_lens": np.asarray([5, 2**31, 0])}),
    ("gather_blocks", GATHER, {"seq_lens": np.asarray([5, 3, 0])}),
    ("gather_blocks", GATHER, {"seq_lens": np.asarray([5, 4, 1])}),
    ("gather_blocks", GATHER, {"rows": np.asarray([0, 1, 3])}),
    ("gather_blocks", GATHER, {"rows": np.asarray([0, -1, 2], np.int32)}),
    ("gather_blocks", GATHER, {"block_table": np.zeros((0, 2), np.int32), "seq_lens": np.zeros(0, np.int32)}),
    ("scatter_blocks", SCATTER, {"block_table": np.asarray([[3, 2], [8, 1], [1, 1]])[:, ::1] + 6}),
    ("scatter_blocks", SCATTER, {"seq_lens": np.asarray([5, 3, 0])}),
    ("transfer_blocks", TRANSFER, {"pairs": np.asarray([(1, 4), (0, 1)])}),
    ("transfer_blocks", TRANSFER, {"pairs": np.asarray([(1, 4), (8, 1)])}),
    ("transfer_blocks", TRANSFER, {"pairs": np.asarray([(1, 5), (8, 1)], np.int32)}),
    ("copy_blocks", COPY, {"pairs": np.asarray([(0, 1), (6, 1)])}),
    ("copy_blocks", COPY, {"pairs": np.asarray([(0, -1), (1, 2)], np.int32)}),
    ("paged_attention", ATTEND, {"block_table": np.asarray([[1, 2, 6], [4, 5, 0]], np.int32)}),
    ("paged_attention", lists(ATTEND), {"block_table": np.asarray([[1, 2, 6], [4, 5, 0]], np.int32)}),
    ("paged_attention", ATTEND, {"seq_lens": np.asarray([10, 13], np.int32)}),
    ("paged_attention", ATTEND, {"seq_lens": np.asarray([-1, 3], np.int32)}),
    ("paged_attention", ATTEND, {"rows": np.asarray([0, 2], np.int32)}),
    ("paged_attention", ATTEND, {"cu_query_lens": np.asarray([1, 2, 3], np.int32)}),
    ("paged_attention", ATTEND, {"cu_query_lens": np.asarray([0, 2, 1], np.int32)}),
    ("paged_attention", ATTEND, {"cu_query_lens": np.asarray([0, 2, 4], np.int32)}),
    ("paged_attention", ATTEND, {"mask": MASK[:-1]}),
    ("paged_attention", ATTEND, {"window": 9, "block_table": np.asarray([[1, 2, 3], [4, -5, -1]], np.int32)}),
    ("paged_attention", SELECT, {"blocks": np.asarray([[[0, 1], [1, 2]], [[0, -1], [0, -1]]], np.int32)}),
    ("paged_attention", SELECT, {"blocks": np.asarray([[[0, 1], [1, 0]], [[0, -1], [0, -1]]])}),
    ("paged_attention", SELECT, {"block_counts": np.asarray([[2, 1], [3, 1]], np.int32)}),
    ("paged_attention", SELECT, {"rows": np.asarray([0, 2], np.int32)}),
    ("latent_attention", LATENT, {"block_table": np.asarray([[1, 2, 6], [4, 5, 0]], np.int32)}),
    ("latent_attention", LATENT, {"rows": np.asarray([0, 2], np.int32)}),
    ("latent_attention", LATENT, {"seq_lens": np.asarray([10, 13], np.int32)}),
]


@together(("op", "arguments"), GOOD)
def test_valid_calls_give_the_same_results_as_without_debug(cuda, op, arguments):
    results = []
    for on in (True, False):
        pagecore.debug(on)
        given = on_device(cuda, arguments)
        result = getattr(pagecore, op)(**given)
        arrays = [x for value in [*given.values(), result] for x in (value if isinstance(value, list) else [value])]
        results.append([cuda.get(x) for x in arrays if isinstance(x, pagecore.Tensor)])
    for with_debug, without in zip(*results, strict=True):
        assert_same_memory(with_debug, without)


@together(("op", "arguments", "change"), BAD)
def test_an_invalid_entry_raises_the_error_of_the_host_and_nothing_is_written(cuda, op, arguments, change):
    given = arguments | change
    with pytest.raises(errors.PagecoreError) as refused:
        getattr(pagecore, op)(**deepcopy(given))
    device = on_device(cuda, given)
    with pytest.raises(type(refused.value)) as raised:
        getattr(pagecore, op)(**device)
    assert str(raised.value) == str(refused.value)
    for name, value in device.items():
        for tensor, array in zip(
            *((value, given[name]) if isinstance(value, list) else ([value], [given[name]])), strict=True
        ):
            if isinstance(array, np.ndarray):
                assert_same_memory(cuda.get(tensor), array)


@together("place", [0, 127, 128, 299])
def test_every_entry_of_a_long_row_and_every_slot_is_checked(cuda, place):
    """More entries than a block of threads has threads."""
    table, slots = np.ones((2, 300), np.int32), np.full(300, -1)
    table[1, place], slots[place] = 9, 24
    cache, lens = cuda.put(np.zeros((9, 4), np.float32)), np.asarray([0, 1200])
    with pytest.raises(errors.InvalidBlock, match=rf"block_table\[1, {place}\] is 9"):
        pagecore.gather_blocks(cache, cuda.put(table), cuda.put(lens), out=cuda.empty((1200,)))
    new = cuda.put(random_numbers((300, 2, 8), "float32"))
    with pytest.raises(errors.InvalidBlock, match=rf"slot_mapping\[{place}\] is 24"):
        pagecore.write_kv(**on_device(cuda, WRITE) | {"key": new, "value": new, "slot_mapping": cuda.put(slots)})


def test_the_lengths_of_many_sequences_are_added_up(cuda):
    """More entries than a block of threads has threads."""
    cache, table = cuda.put(np.zeros((9, 4), np.float32)), cuda.put(np.ones((300, 1), np.int32))
    lens = cuda.put(np.full(300, 2))
    pagecore.gather_blocks(cache, table, lens, out=cuda.empty((600,)))
    for num_tokens in (256, 599):  # exactly the first 128 sequences, and one token too few for all
        with pytest.raises(errors.ShapeError, match=str(num_tokens)):
            pagecore.gather_blocks(cache, table, lens, out=cuda.empty((num_tokens,)))


@pytest.mark.parametrize(("op", "arguments", "change"), BAD)
def test_an_invalid_entry_does_no_harm_without_debug(cuda, op, arguments, change):
    """The call does not raise, and the emulator, which checks every access, finds none outside of the arrays."""
    pagecore.debug(False)
    if change.keys() & {"mask", "cu_query_lens"}:
        pytest.skip("needs another op: tests/cuda/test_attention.py covers attention")
    getattr(pagecore, op)(**on_device(cuda, arguments | change))


@together("change", [WINDOW, {"mask": HIDDEN, "block_table": np.asarray([[1, 2, 3], [-4, 5, 0]])}])
def test_blocks_that_no_query_attends_to_may_hold_anything(cuda, change):
    pagecore.paged_attention(**on_device(cuda, ATTEND | change))


def test_entries_on_the_host_are_checked_without_debug_too(cuda):
    pagecore.debug(False)
    with pytest.raises(errors.InvalidBlock):
        pagecore.write_kv(**on_device(cuda, WRITE) | {"slot_mapping": [24]})


def test_a_captured_call_is_refused(cuda, monkeypatch):
    given = on_device(cuda, COPY)
    pagecore.copy_blocks(**given)  # loads the kernel
    monkeypatch.setattr(cuda.runtime, "is_capturing", lambda stream: True)
    with pytest.raises(errors.UnsupportedOption, match=r"captured.*pagecore\.debug\(False\)"):
        pagecore.copy_blocks(**given)
    pagecore.debug(False)
    pagecore.copy_blocks(**given)


def test_none_means_the_setting_of_the_environment(monkeypatch):
    monkeypatch.setenv("PAGECORE_DEBUG", "1")
    assert pagecore.debug() is True
    assert pagecore.debug(False) is False
    assert pagecore.debug(None) is True
    monkeypatch.setenv("PAGECORE_DEBUG", "0")
    assert pagecore.debug(None) is False
    monkeypatch.setenv("PAGECORE_DEBUG", "yes")
    pagecore.debug(True)
    with pytest.raises(errors.UnsupportedOption, match="PAGECORE_DEBUG is 'yes'"):
        pagecore.debug(None)
    monkeypatch.delenv("PAGECORE_DEBUG")
    assert pagecore.debug(None) is False
    assert os.environ.get("PAGECORE_DEBUG") is None


@together("on", [1, 0, "1", [], np.bool_(True)])
def test_debug_is_true_false_or_none(on):
    with pytest.raises(errors.UnsupportedOption, match="it must be True, False or None"):
        pagecore.debug(on)
