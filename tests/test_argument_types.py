"""Values of a wrong type: every public call refuses them with an error of its own, and never reads them as a number."""

import numpy as np
import pytest

import pagecore
from pagecore import (
    AttentionSpec,
    BlockPool,
    BlockTables,
    CrossSpec,
    LatentSpec,
    PagedKVCache,
    RadixTree,
    SlotAllocator,
)
from pagecore.errors import PagecoreError
from pagecore.serving import plan_memory
from pagecore.storage.checks import as_float, member, require_int
from pagecore.storage.specs.checkpoint_format import checked_names
from pagecore.tiers import DiskStore, EventPublisher, Fingerprint, content_chain

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
QUERY = np.ones((1, 4, 8), np.float32)
CACHE = np.ones((3, 4, 2, 8), np.float32)


def attend(**options):
    return pagecore.paged_attention(QUERY, CACHE, CACHE, [[1, 2]], [5], **options)


def plan(**options):
    return pagecore.plan_attention(None, [5], **{"num_query_heads": 4, "num_kv_heads": 2, **options})


def fingerprint(**fields):
    return Fingerprint(**{"model": "m", "lanes": ("a",), "payload_bytes": (8,), "block_size": 4, **fields})


def store(folder):
    return DiskStore(folder, fingerprint=fingerprint(), max_bytes="1MiB")


class WithoutIndex:
    """An object whose ``__index__`` raises."""

    def __index__(self):
        raise ZeroDivisionError("no integer")


COUNTS = {
    "window": lambda value: attend(window=value),
    "window_side": lambda value: attend(window=(value, 0)),
    "chunk": lambda value: attend(chunk=value),
    "sink_tokens": lambda value: attend(window=2, sink_tokens=value),
    "num_query_heads": lambda value: plan(num_query_heads=value, num_kv_heads=1),
    "num_workers": lambda value: plan(num_workers=value),
    "k": lambda value: pagecore.select_topk(np.ones((2, 3), np.float32), value),
    "budget": lambda value: pagecore.select(np.ones((2, 3), np.float32), value, lens=3),
    "words": lambda value: pagecore.tree_mask([-1, 0], words=value),
    "shape": lambda value: pagecore.zeros((2, value)),
    "slot_block": lambda value: pagecore.slots_of([[1]], [[1]], value),
    "head_dim": lambda value: AttentionSpec(2, value),
    "block_size": lambda value: PagedKVCache(SPEC, num_blocks=9, block_size=value),
    "num_layers": lambda value: PagedKVCache(SPEC, num_blocks=9, num_layers=value),
    "layer": lambda value: PagedKVCache(SPEC, num_layers=2, num_blocks=9).key(value),
    "pool": lambda value: BlockPool(9).try_allocate(value),
    "tables": lambda value: BlockTables([BlockPool(9)], max_sequences=value, max_blocks_per_sequence=4),
    "tree": RadixTree,
    "windows": lambda value: RadixTree(4, windows=(value,)),
    "keep": lambda value: RadixTree(4).evict_path([1], keep=value),
    "slots": lambda value: SlotAllocator(BlockPool(9), value),
    "threads": pagecore.set_num_threads,
}


@pytest.mark.parametrize("value", [True, "1", 1.0, None, [1], np.array([])], ids=repr)
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_an_integer_and_no_bool(name, value):
    optional = {"window", "window_side", "chunk", "sink_tokens", "num_workers", "words", "block_size", "num_layers"}
    optional |= {"threads"}
    lists = {"shape"}  # its entries only
    if (value is None and name in optional) or (isinstance(value, list) and name in lists):
        return
    with pytest.raises(PagecoreError):
        COUNTS[name](value)


@pytest.mark.parametrize("name", ["window_side", "chunk", "sink_tokens", "num_workers", "k", "words", "slot_block"])
def test_an_object_that_cannot_be_an_integer_is_refused_as_a_count(name):
    argument = {"window_side": "window", "slot_block": "block_size"}.get(name, name)
    with pytest.raises(PagecoreError, match=f"^{argument} "):
        COUNTS[name](WithoutIndex())


CHECKED = {
    "window": COUNTS["window_side"],
    "chunk": COUNTS["chunk"],
    "sink_tokens": COUNTS["sink_tokens"],
    "num_query_heads": COUNTS["num_query_heads"],
    "k": COUNTS["k"],
    "budget": COUNTS["budget"],
    "words": COUNTS["words"],
    "tree_mask": lambda value: attend(tree_mask=[value]),
    "shape": COUNTS["shape"],
    "the number of threads": COUNTS["threads"],
    "head_dim": COUNTS["head_dim"],
    "block_size": COUNTS["block_size"],
    "num_layers": COUNTS["num_layers"],
    "layer": COUNTS["layer"],
    "n": COUNTS["pool"],
    "max_sequences": COUNTS["tables"],
    "a window": COUNTS["windows"],
    "keep": COUNTS["keep"],
    "row": lambda value: BlockTables([BlockPool(9)], max_sequences=2, max_blocks_per_sequence=4).length(value),
    "max_tokens": lambda value: RadixTree(4).match([1], max_tokens=value),
    "a span's digest": lambda value: RadixTree(4).match([1], spans=[(0, 1, value)]),
    "spans": lambda value: RadixTree(4).match([1], spans=[(0, value, 1)]),
    "states": lambda value: RadixTree(4, states=True).insert([1] * 4, [1], states=[(4, value)]),
    "amount": lambda value: RadixTree(4).evict("full", value),
    "num_pinned": lambda value: require_int("num_pinned", value),
    "member": lambda value: member("member", value, 3, "the cache"),
}


@pytest.mark.parametrize("error", [ZeroDivisionError, OSError, OverflowError, UnicodeError])
@pytest.mark.parametrize("name", CHECKED)
def test_what_an_object_raises_as_an_integer_is_the_cause_of_the_refusal(name, error):
    raised = error("no integer")

    class Raises:
        def __index__(self):
            raise raised

    with pytest.raises(PagecoreError, match=rf"\b{name}\b") as caught:
        CHECKED[name](Raises())
    cause = caught.value.__cause__
    assert raised in (cause, getattr(cause, "__cause__", None))  # a list has an error for its entry


@pytest.mark.parametrize("name", [name for name in CHECKED if name != "tree_mask"])  # its copy is of pagecore
def test_a_lack_of_memory_of_an_object_is_no_refusal(name):
    class Lacks:
        def __index__(self):
            raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left") as caught:
        CHECKED[name](Lacks())
    assert not isinstance(caught.value, PagecoreError)


FLOATS = {
    "time": lambda value: RadixTree(4).evict("full", 1, time=value),
    "rank": lambda value: RadixTree(4, policy="rank").insert([1] * 4, [1], rank=value),
    "num": lambda value: as_float("num", value),
}


@pytest.mark.parametrize("name", FLOATS)
def test_what_an_object_raises_as_a_number_is_the_cause_of_the_refusal(name):
    raised = ZeroDivisionError("no number")

    class Raises:
        def __float__(self):
            raise raised

    with pytest.raises(PagecoreError, match=rf"^{name} is") as caught:
        FLOATS[name](Raises())
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize("call", [lambda ids: BlockPool(9).free(ids), lambda ids: RadixTree(4).match(ids)])
def test_what_an_array_of_ids_raises_is_the_cause_of_the_refusal(call):
    raised = OSError("no array")

    class Raises:
        def __array__(self, dtype=None, copy=None):
            raise raised

    with pytest.raises(PagecoreError, match=r"^(block|token)s cannot be read by NumPy: no array") as caught:
        call(Raises())
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize(
    "value", [2, -1, 10**30, float("nan"), 1.0, np.float64("nan"), np.array(2), "yes", None], ids=repr
)
def test_a_flag_is_true_or_false(value):
    for call in (attend, plan):
        with pytest.raises(PagecoreError, match=r"causal is .*; it must be True or False"):
            call(causal=value)
    with pytest.raises(PagecoreError, match="independent"):
        pagecore.copy_blocks(CACHE.copy(), [(1, 2)], independent=value)


@pytest.mark.parametrize("value", [True, np.True_, 1, np.array(True), np.int64(1)], ids=repr)
def test_a_flag_may_be_the_0_or_1_of_a_config(value):
    causal, other = attend(causal=value), attend(causal=not value)
    assert np.array_equal(causal, other)  # a query at the end sees every key in either case
    assert plan(causal=value).causal is True


@pytest.mark.parametrize("words", [2**31, 2**63, 10**30, 0, -1])
def test_words_of_a_tree_fit_an_int32(words):
    with pytest.raises(PagecoreError, match="words is "):
        pagecore.tree_mask([-1, 0], words=words)


def test_rows_of_a_tree_that_do_not_fit_in_memory_are_refused():
    with pytest.raises(pagecore.NotEnoughMemory, match="words is 2147483647"):
        pagecore.tree_mask(np.arange(-1, 2**16 - 1), words=2**31 - 1)


WRONG = {
    "shape": lambda: pagecore.empty("3"),
    "shape bytes": lambda: pagecore.zeros(b"\x02"),
    "shape dict": lambda: pagecore.zeros({2: 3}),
    "parents": lambda: pagecore.tree_mask([[[-1, 0, 0], [-1]]]),
    "order": lambda: BlockPool(9, order=np.zeros(0)),
    "component": lambda: RadixTree(4).evict(np.zeros(2, [("a", "i4")]), 1),
    "time": lambda: RadixTree(4).match_and_lock([1], time="3"),
    "namespaces": lambda: RadixTree(4).match_all([[1], [2]], namespaces="ab"),
    "state tables": lambda: pagecore.StateTable(None, 9),
    "lookahead": lambda: CrossSpec(2, 8, lookahead=np.zeros(2)),
    "lookahead None": lambda: CrossSpec(2, 8, lookahead=None),
    "index_format": lambda: LatentSpec(16, 4, scale=1.0, index_format=np.zeros(2)),
    "planes": lambda: checked_names(SPEC.planes, [np.zeros((2, 2))]),
    "lanes": lambda: fingerprint(lanes=None),
    "lane": lambda: fingerprint(lanes=(3,)),
    "payload_bytes": lambda: fingerprint(payload_bytes=8),
    "fingerprint": lambda: content_chain(None, [1, 2]),
    "ragged tokens": lambda: content_chain(fingerprint(), [1, [2]]),
    "device": lambda: plan_memory([SPEC], "1MiB", device="tpu"),
    "folder": lambda: store("\ud800"),
    "topic": lambda: EventPublisher(PagedKVCache(SPEC, num_blocks=9), endpoint="inproc://x", topic="\ud800"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_another_type_is_refused(name):
    with pytest.raises(PagecoreError):
        WRONG[name]()


@pytest.mark.parametrize(
    "call",
    [
        lambda text: BlockPool(9, order=text),
        lambda text: RadixTree(4, policy=text),
        lambda text: RadixTree(4, states=text),
        lambda text: SlotAllocator(BlockPool(9), 4, index_dtype=text),
        lambda text: pagecore.StepBuffers(1, 1, slot_dtype=text),
        pagecore.set_isa,
    ],
)
def test_a_long_text_is_cut_in_the_message(call):
    with pytest.raises(PagecoreError) as caught:
        call("y" * 10_000)
    assert len(str(caught.value)) < 400
