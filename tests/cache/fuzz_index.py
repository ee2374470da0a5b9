"""Fuzz targets of the index."""

import numpy as np

from pagecore import (
    BlockPool,
    BlockTables,
    RadixTree,
    RequestTable,
    SlotAllocator,
    StepBuffers,
)
from tests.cache.fuzz_base import Target


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
        "tables.shortage rows:rows counts:one first_blocks=some",
        "tables.take_copies group=none",
        "tables.prepare rows:rows counts:one buffers:buffers first_blocks=some",
        "tables.try_prepare rows:rows counts:one buffers:buffers first_blocks=some",
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
        "RadixTree block_size:some full=some windows=ids states=yes state_interval=some min_kept=some policy=policy",
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
