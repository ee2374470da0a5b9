"""Public classes, their methods, and good arguments of each; foreign ones come from `foreign`.

A method is "name argument:kind ... option!kind ... option=kind": arguments are given by position, options by name, and
those with "=" not always.
A kind names the method of the target that makes a good value.
"""

import contextlib

import numpy as np

from pagecore import (
    AttentionSpec,
    BlockPool,
    BlockTables,
    InvalidSequence,
    KVLayout,
    KVPool,
    OutOfBlocks,
    PagecoreError,
    PagedKVCache,
    Plane,
    RadixTree,
    RequestTable,
    Sequence,
    SlotAllocator,
    StaticKVCache,
    StepBuffers,
    SwapSpace,
    TensorParallel,
    effective_length,
)
from pagecore.cache import Alias
from tests.cache.state import reachable

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=2)
WINDOWED = AttentionSpec(2, 8, dtype="float32", num_query_heads=2, window=6)


class Target:
    """Something whose methods are called.

    `named` maps what precedes a method's dot to the object that has it; a class is called to make one of it.
    """

    methods = ()

    def __init__(self, random):
        self.random = random
        self.depth = 0

    def callback(self):
        """Call back into the object that is being called, as a value of the caller's may."""
        if self.depth > 1:
            return
        self.depth += 1
        try:
            self.mischief()
        except PagecoreError:
            pass
        finally:
            self.depth -= 1

    def mischief(self):
        pass

    def check(self):
        pass

    def finish(self):
        """Give everything back, at the end of a target's life."""

    # -- good values ---------------------------------------------------------------------------------------------------

    def one(self):
        return int(self.random.integers(0, 4))

    def some(self):
        return int(self.random.integers(1, 9))

    def ids(self):
        return self.random.integers(0, 9, self.some()).tolist()

    def array(self):
        return np.asarray(self.ids(), np.int32)

    def yes(self):
        return bool(self.random.integers(2))

    def none(self):
        return None

    def number(self):
        return float(self.random.integers(0, 100))

    def spec(self):
        return SPEC

    def dtype(self):
        return "float32"

    def device(self):
        return "cpu"

    def layout(self):
        return "layerwise"

    def parallel(self):
        return TensorParallel(0, 1)


class Paged(Target):
    methods = (
        "cache.add_sequence tokens:ids id=name namespace=space_name spans=spans max_tokens=some",
        "priority.add_sequence tokens:ids priority=number time_to_live=number",
        "rank.add_sequence tokens:ids rank=number",
        "cache.match_length tokens:ids namespace=space_name spans=spans max_tokens=some",
        "cache.append_tokens sequences:sequences ids:ids",
        "cache.fork sequence:sequence id=name",
        "cache.reorder sequences:sequences parents:sequences",
        "cache.truncate sequences:sequences lengths:one",
        "cache.remove sequence:sequence rank=none",
        "rank.remove sequence:sequence rank=number",
        "cache.swap_out sequences:sequences space:space",
        "cache.try_swap_out sequences:sequences space:space",
        "cache.swap_in sequences:swapped",
        "cache.try_swap_in sequences:swapped",
        "cache.make_batch max_sequences=some max_tokens=some",
        "cache.prepare sequences:sequences counts:one out=batch stream=none",
        "cache.try_prepare sequences:sequences counts:one out=batch stream=none",
        "cache.shortage sequences:sequences counts:one",
        "cache.commit batch:batch accepted=accepted",
        "cache.abandon batch:batch",
        "cache.write layer:layer key:tokens value:tokens batch:batch stream=none",
        "cache.attend layer:layer query:tokens batch:batch scale=number window=some softcap=number out=tokens "
        "plan=none causal=yes sinks=ids",
        "cache.block_map group:layer",
        "cache.block_table group:layer",
        "cache.group_of layer:layer",
        "cache.spec layer:layer",
        "cache.key layer:layer",
        "cache.value layer:layer",
        "batch.group layer:layer",
        "batch.copied_blocks layer:layer",
        "sequence.__exit__ kind:none error:none trace:none",
        "PagedKVCache layers:spec num_blocks!some num_layers=one block_size=some memory=none max_sequences=some "
        "max_tokens_per_sequence=some device=device layout=layout parallel=parallel prefix_cache=yes "
        "eviction_policy=policy index_dtype=index clock=clock",
        "PagedKVCache layers:specs num_blocks!blocks",
        "SwapSpace cache:cache num_blocks!some memory=none layout=layout dtype=dtype",
        "Sequence owner:cache id:name row:one ids:array",
    )

    def __init__(self, random):
        super().__init__(random)
        options = {"block_size": 4, "max_sequences": 6}
        self.named = {
            "PagedKVCache": PagedKVCache,
            "SwapSpace": SwapSpace,
            "Sequence": Sequence,
            "priority": PagedKVCache(SPEC, num_blocks=9, eviction_policy="priority", **options),
            "rank": PagedKVCache(SPEC, num_blocks=9, eviction_policy="rank", **options),
        }
        cache = self.named["cache"] = PagedKVCache([SPEC, WINDOWED], num_blocks=17, **options)
        self.spaces = [SwapSpace(cache, num_blocks=9) for _ in range(2)]
        self.living = [cache.add_sequence(range(4 * i + 3)) for i in range(4)]
        cache.commit(cache.prepare(self.living, [3, 7, 8, 2]))
        cache.swap_out(self.living[2], self.spaces[0])
        self.ready = cache.make_batch(4, 16)
        self.flying = cache.prepare(self.living[:1], 2)
        self.named |= {"batch": self.flying, "sequence": self.living[1]}

    def mischief(self):
        cache = self.named["cache"]
        choice = self.random.integers(7)
        if choice == 0:
            cache.remove(self.sequence())
        elif choice == 1:
            self.living.append(cache.add_sequence(self.ids()))
        elif choice == 2:
            cache.swap_out(self.sequence(), self.space())
        elif choice == 3:
            cache.commit(self.flying)
        elif choice == 4:
            cache.truncate(self.sequence(), 0)
        elif choice == 5:
            with contextlib.suppress(OutOfBlocks):
                cache.prepare([self.sequence()], 3, out=self.ready)
        else:
            cache.clear_prefix_cache()

    def check(self):
        for name in ("cache", "priority", "rank"):
            self.named[name].check_invariants()

    def finish(self):
        cache = self.named["cache"]
        for batch in (self.flying, self.ready):
            if batch.in_flight:
                cache.abandon(batch)
        self.depth = 99  # from here on nothing calls back
        for sequence in reachable(cache, Sequence):
            with contextlib.suppress(InvalidSequence):  # another cache's, by way of an id
                cache.remove(sequence)
        cache.clear_prefix_cache()
        self.check()
        stats = cache.stats()
        left = (stats.num_sequences, stats.num_used_blocks, stats.num_cached_blocks, stats.num_swapped_blocks)
        assert left == (0, 0, 0, 0), f"sequences, used, cached and swapped blocks at the end: {left}"

    def state(self):
        """What an error must leave as it was."""
        cache = self.named["cache"]
        maps = [cache.block_map(group) for group in range(2)]
        counts = [array.tolist() for one in maps for array in (one.owner, one.holders, one.cached, one.num_tokens)]
        lines = [(one.num_tokens, one.num_computed_tokens, one.is_swapped, one.row) for one in self.living]
        return maps[0].sequences, counts, lines, cache.stats(), self.ready.in_flight, self.flying.in_flight

    def sequence(self):
        return self.living[self.random.integers(len(self.living))]

    def sequences(self):
        return [self.living[i] for i in self.random.permutation(len(self.living))[: self.random.integers(1, 3)]]

    def swapped(self):
        return [one for one in self.living if one.is_swapped] or self.sequences()

    def batch(self):
        return self.ready if self.one() == 0 else self.flying

    def accepted(self):
        return [1]

    def space(self):
        return self.spaces[self.random.integers(2)]

    def cache(self):
        return self.named["cache"]

    def name(self):
        return f"name {self.random.integers(1 << 30)}"

    def space_name(self):
        return ("adapter", self.one())

    def spans(self):
        return [(0, 2, b"digest")]

    def layer(self):
        return int(self.random.integers(2))

    def tokens(self):
        return np.ones((2, 2, 8), np.float32)

    def policy(self):
        return "lru"

    def index(self):
        return "int64"

    def clock(self):
        return lambda: 0.0

    def specs(self):
        return [SPEC, WINDOWED, Alias(0)]

    def blocks(self):
        return [9, 9]


class Static(Target):
    methods = (
        "cache.update layer:layer key:tokens value:tokens position:one stream=none",
        "cache.key layer:layer",
        "cache.value layer:layer",
        "cache.length layer:layer",
        "cache.spec layer:layer",
        "cache.reset stream=none",
        "StaticKVCache spec:spec num_layers=some max_batch_size=some max_length=some device=device parallel=parallel",
    )

    def __init__(self, random):
        super().__init__(random)
        cache = StaticKVCache(SPEC, 2, max_batch_size=2, max_length=16)
        self.named = {"StaticKVCache": StaticKVCache, "cache": cache}

    def mischief(self):
        self.named["cache"].reset()

    def layer(self):
        return int(self.random.integers(2))

    def tokens(self):
        return np.ones((2, 2, 3, 8), np.float32)


class Storage(Target):
    methods = (
        "KVPool spec:spec num_layers:some num_blocks:blocks block_size=some layout=layout device=device buffers=none",
        "pool.plane name:plane layer=one",
        "pool.key layer=one",
        "pool.value layer=one",
        "KVPool.blocks_for memory:memory spec:spec num_layers:some block_size=some device=device",
        "KVLayout order:layout heads=heads planes=spec num_layers=some num_blocks=some block_size=some",
        "layout.bind planes:spec num_layers:some num_blocks:blocks block_size:some",
        "bound.block_offset block:one layer=one",
        "bound.buffer_nbytes buffer=one",
        "bound.plane_layout index:one",
        "AttentionSpec num_kv_heads:some head_dim:some v_head_dim=some dtype=dtype window=some num_query_heads=some "
        "scale=number softcap=number sinks=ids",
        "Plane name:plane shape:ids dtype:dtype per=per",
        "TensorParallel rank:one size:some",
        "parallel.heads num_kv_heads:some",
        "parallel.query_heads num_query_heads:some",
        "parallel.shard spec:spec",
        "Alias target:one",
        "effective_length configured:some model_maximum:some",
    )

    def __init__(self, random):
        super().__init__(random)
        classes = (KVPool, KVLayout, AttentionSpec, Plane, TensorParallel, Alias)
        self.named = {one.__name__: one for one in classes} | {
            "effective_length": effective_length,
            "pool": KVPool(SPEC, 2, 5, 4),
            "layout": KVLayout(),
            "bound": KVLayout().bind(SPEC.planes, 2, 5, 4),
            "parallel": TensorParallel(1, 2),
        }

    def blocks(self):
        return int(self.random.integers(2, 9))

    def plane(self):
        return "key"

    def memory(self):
        return "1MiB"

    def heads(self):
        return "HND"

    def per(self):
        return "token"


class Index(Target):
    methods = (
        "BlockPool num_blocks:some order=order",
        "pool.allocate n:one",
        "pool.try_allocate n:one",
        "pool.share blocks:taken",
        "pool.free blocks:taken",
        "pool.retire blocks:taken step:some",
        "pool.reclaim step:some",
        "pool.ref_count block:one",
        "BlockTables pools:pool max_sequences!some max_blocks_per_sequence!some block_sizes=some",
        "tables.add prefix=taken",
        "tables.fork row:row",
        "tables.remove rows:rows",
        "tables.reorder rows:rows parents:rows",
        "tables.extend rows:rows counts:one out=slots",
        "tables.try_extend rows:rows counts:one out=slots",
        "tables.shortage rows:rows counts:one",
        "tables.take_copies group=none",
        "tables.prepare rows:rows counts:one buffers:buffers",
        "tables.try_prepare rows:rows counts:one buffers:buffers",
        "tables.take_changes out:slots",
        "tables.truncate rows:rows lengths:one keep_capacity=yes",
        "tables.release_before rows:rows group:zero positions:one",
        "tables.length row:row",
        "tables.lengths rows:rows",
        "tables.capacity row:row",
        "tables.blocks row:row group=zero",
        "tables.table group=zero",
        "tables.fill rows:rows out:matrix lengths=none group=zero",
        "tables.check_invariants exclusive=yes",
        "StepBuffers max_sequences:some max_tokens:some num_groups=some slot_dtype=index",
        "RequestTable num_requests:some max_context:some dtype=index",
        "requests.allocate n:one",
        "requests.try_allocate n:one",
        "requests.free rows:request",
        "requests.write rows:request starts:zero slots:array counts=none",
        "requests.read row:zero start:zero stop:some",
        "requests.length row:zero",
        "SlotAllocator pool:pool block_size:some index_dtype=index",
        "slots.allocate n:block out=none",
        "slots.try_allocate n:block out=none",
        "slots.extend prefix_lens:lens seq_lens:lens last_slots:lens out=none",
        "slots.try_extend prefix_lens:lens seq_lens:lens last_slots:lens out=none",
        "slots.decode seq_lens:lens last_slots:lens out=none",
        "slots.try_decode seq_lens:lens last_slots:lens out=none",
        "slots.free slots:array",
    )

    def __init__(self, random):
        super().__init__(random)
        pool = BlockPool(33)
        tables = BlockTables(BlockPool(33), block_sizes=4, max_sequences=4, max_blocks_per_sequence=8)
        self.living = [tables.add(), tables.add()]
        tables.extend(self.living, [5, 9])
        requests = RequestTable(4, 16)
        self.taken_requests = requests.allocate(2)
        classes = (BlockPool, BlockTables, StepBuffers, RequestTable, SlotAllocator)
        self.named = {one.__name__: one for one in classes} | {
            "pool": pool,
            "tables": tables,
            "requests": requests,
            "slots": SlotAllocator(BlockPool(33), 4),
        }
        self.held = pool.allocate(4)

    def mischief(self):
        choice = self.random.integers(5)
        if choice == 0:
            self.named["tables"].remove(self.row())
        elif choice == 1:
            self.living.append(self.named["tables"].fork(self.row()))
        elif choice == 2:
            self.named["pool"].allocate(2)
        elif choice == 3:
            self.named["requests"].free(self.request())
        else:
            self.named["tables"].extend([self.row()], 3)

    def check(self):
        for name in ("pool", "tables", "requests", "slots"):
            self.named[name].check_invariants()

    def order(self):
        return "lifo"

    def taken(self):
        return self.held[:1].tolist()

    def pool(self):
        return self.named["pool"]

    def row(self):
        return self.living[self.random.integers(len(self.living))]

    def rows(self):
        return [self.row()]

    def request(self):
        return self.taken_requests[: self.one()]

    def slots(self):
        return np.zeros(16, np.int64)

    def matrix(self):
        return np.zeros((4, 8), np.int32)

    def buffers(self):
        return StepBuffers(4, 16)

    def zero(self):
        return 0

    def block(self):
        return 4

    def index(self):
        return "int64"

    def lens(self):
        return [self.one()]


class Radix(Target):
    methods = (
        "RadixTree block_size:some full=some windows=ids states=yes state_interval=some policy=policy",
        "tree.match tokens:ids namespace=space_name spans=spans max_tokens=some",
        "tree.match_and_lock tokens:ids namespace=space_name spans=spans max_tokens=some time=number",
        "tree.release receipt:receipt component=component time=number rank=none",
        "tree.insert tokens:ids blocks:blocks namespace=space_name spans=spans receipt=receipt time=number states=none "
        "priority=number time_to_live=number",
        "tree.extend tokens:ids blocks:blocks receipt:receipt time=number",
        "tree.block_at receipt:receipt index:one lane=zero",
        "tree.replace receipt:receipt index:one block:some lane=zero",
        "tree.evict component:component amount:one time=number",
        "tree.held_blocks lane=zero",
        "tree.evictable component=component",
        "tree.protected component=component",
        "tree.match_all prefixes:prefixes namespaces=none spans=none max_tokens=none",
        "tree.match_and_lock_all prefixes:prefixes namespaces=none spans=none max_tokens=none time=number",
        "tree.release_all receipts:receipts time=number",
        "tree.insert_all entries:entries time=number",
        "receipt.release component=component time=number rank=none",
    )

    def __init__(self, random):
        super().__init__(random)
        tree = RadixTree(1, policy="priority")
        tree.insert([1, 2, 3], [11, 12, 13])
        self.next = 20
        self.locked = [tree.match_and_lock([1, 2, 3]), tree.match_and_lock([])]
        self.named = {"RadixTree": RadixTree, "tree": tree, "receipt": self.locked[0]}

    def mischief(self):
        tree, choice = self.named["tree"], self.random.integers(4)
        if choice == 0:
            tree.evict("full", 2)
        elif choice == 1:
            self.locked.append(tree.match_and_lock(self.ids(), namespace=self.space_name()))
        elif choice == 2:
            self.receipt().release()
        else:
            tree.insert(self.ids()[:1], self.blocks()[:1], namespace=self.space_name())

    def check(self):
        tree = self.named["tree"]
        tree.check_invariants()
        assert tree.num_receipts >= 0, f"{tree.num_receipts} receipts are out"

    def receipt(self):
        return self.locked[self.random.integers(len(self.locked))]

    def receipts(self):
        return [self.receipt()]

    def blocks(self):
        self.next += 9
        return list(range(self.next, self.next + self.some()))

    def component(self):
        return "full"

    def zero(self):
        return 0

    def space_name(self):
        return ("adapter", self.one())

    def spans(self):
        return [(0, 1, 5)]

    def policy(self):
        return "lru"

    def prefixes(self):
        return [self.ids(), self.ids()]

    def entries(self):
        tokens = self.ids()
        self.next += 9
        return [{"tokens": tokens, "blocks": list(range(self.next, self.next + len(tokens)))}]


TARGETS = {one.__name__: one for one in (Paged, Static, Storage, Index, Radix)}
