"""Prefix cache made of the index alone: tree, tables and pools, each with its plain twin.

Every call goes to both, which must return equal results or raise equal errors. Blocks have contents, too: a slot holds
the prefix that ends there, so that a block that is reused for another prefix is detected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from pagecore.errors import OutOfBlocks, OutOfRows
from pagecore.index import BlockPool, BlockTables, RadixTree
from tests.reference.block_pool import BlockPool as TwinPool
from tests.reference.block_tables import BlockTables as TwinTables
from tests.reference.radix_tree import RadixTree as TwinTree
from tests.reference.radix_tree import typed


@dataclass(eq=False)
class Sequence:
    row: int
    tokens: list[int]  # the first tables.length(row) of them are computed
    namespace: object
    receipt: object = field(repr=False)
    twin_receipt: object = field(repr=False)
    runs_on: bool = True  # can extend its receipt: no token before its end was truncated


def lists(arrays):
    return [array.tolist() for array in arrays]


class PrefixCache:
    """Groups are in the order of the lanes of the tree: `full` plain groups, then one for each window."""

    def __init__(self, block_size, full, windows, pool_sizes, max_sequences, max_blocks, policy):
        self.block_size, self.full, self.windows = block_size, full, windows
        self.tree = RadixTree(block_size, full=full, windows=windows, policy=policy)
        self.twin_tree = TwinTree(block_size, full=full, windows=windows, policy=policy)
        self.groups = range(full + len(windows))
        self.pools = [BlockPool(size) for size in pool_sizes]
        self.twin_pools = [TwinPool(size) for size in pool_sizes]
        sizes = [block_size] * len(self.groups)
        self.tables = BlockTables(
            self.pools, block_sizes=sizes, max_sequences=max_sequences, max_blocks_per_sequence=max_blocks
        )
        self.twin_tables = TwinTables(self.twin_pools, sizes, max_sequences, max_blocks)
        self.sequences: list[Sequence] = []
        self.content = [{} for _ in self.groups]  # slot -> the prefix that was written there

    # Lookup.

    def length(self, sequence):
        return self.twin_tables.rows[sequence.row].length

    def blocks(self, sequence, group):
        return self.twin_tables.rows[sequence.row].blocks[group]

    def component(self, group):
        return max(0, group - self.full + 1)

    def per_lane(self, blocks):
        return [blocks] if len(self.groups) == 1 else list(blocks)

    def whole(self, num_tokens):
        return num_tokens // self.block_size * self.block_size

    # Calls of a cache.

    def add(self, tokens, namespace):
        """Match, pin and share; return None if no row is left."""
        limit = self.whole(len(tokens) - 1)
        options = {"namespace": namespace, "max_tokens": limit}
        receipt = self.tree.match_and_lock(tokens, **options)
        found, twin_receipt = self.twin_tree.match_and_lock(tokens, **options)
        prefix = lists(self.per_lane(receipt.match.blocks))
        assert prefix == found["blocks"]
        assert receipt.num_tokens == found["num_tokens"] <= limit
        try:
            row = self.twin_tables.add(prefix)
        except OutOfRows:
            with pytest.raises(OutOfRows):
                self.tables.add(prefix)
            self.release(receipt, twin_receipt)
            return None
        assert self.tables.add(prefix) == row
        sequence = Sequence(row, list(tokens), namespace, receipt, twin_receipt)
        self.sequences.append(sequence)
        return sequence

    def release(self, receipt, twin_receipt):
        receipt.release()
        self.twin_tree.release(twin_receipt)

    def compute(self, sequences, counts):
        """Take blocks for the next tokens, evicting if needed, and write them; return False if blocks are short."""
        rows = [sequence.row for sequence in sequences]
        self.make_room(rows, counts)
        try:
            slots = self.twin_tables.extend(rows, counts)
        except OutOfBlocks:
            with pytest.raises(OutOfBlocks):
                self.tables.extend(rows, counts)
            return False
        assert lists(self.tables.extend(rows, counts)) == slots
        self.write(sequences, counts, slots)
        return True

    def make_room(self, rows, counts):
        """Evict the blocks that each group lacks; evict nothing if that is not enough for one of them."""
        shortage = self.twin_tables.shortage(rows, counts)
        if any(missing > self.twin_tree.evictable(self.component(group)) for group, missing in enumerate(shortage)):
            return
        for group in reversed(self.groups):
            self.evict(self.component(group), self.twin_tables.shortage(rows, counts)[group])

    def write(self, sequences, counts, slots):
        """Run pending copies, then write the new tokens."""
        for group, written in enumerate(slots):
            content = self.content[group]
            for source, target in self.take_copies(group):
                for offset in range(self.block_size):
                    content[target * self.block_size + offset] = content.get(source * self.block_size + offset)
            left = iter(written)
            for sequence, count in zip(sequences, counts, strict=True):
                end = self.length(sequence)
                for position in range(end - count, end):
                    content[next(left)] = self.prefix(sequence, position)

    def prefix(self, sequence, position):
        return typed(sequence.namespace), tuple(sequence.tokens[: position + 1])

    def evict(self, component, amount):
        """Evict, free the evicted blocks, and return the number that became free in each group."""
        gone = self.tree.evict(self.tree.components[component], amount)
        evicted, ids = self.twin_tree.evict(component, amount)
        assert gone.amount == evicted
        assert lists(self.per_lane(gone.blocks)) == ids[:-1]
        freed = []
        for pool, twin, blocks in zip(self.pools, self.twin_pools, ids, strict=False):
            freed.append(twin.free(blocks))
            assert pool.free(blocks) == freed[-1]
        return freed

    def publish_all(self, sequences, most=None):
        """Insert the computed whole blocks of the first `most` tokens; receipts move to their end."""
        offers = [self.offer(sequence, most) for sequence in sequences]
        entries = [{**offer, "receipt": each.receipt} for offer, each in zip(offers, sequences, strict=True)]
        for offer, each, done in zip(offers, sequences, self.tree.insert_all(entries), strict=True):
            self.took(offer, each, done)

    def offer(self, sequence, most):
        tokens = sequence.tokens[: self.length(sequence)][:most]
        count = len(tokens) // self.block_size
        lanes = [self.tables.blocks(sequence.row, group)[:count] for group in self.groups]
        blocks = lanes[0] if len(lanes) == 1 else lanes
        return {"tokens": tokens, "blocks": blocks, "namespace": sequence.namespace}

    def took(self, offer, sequence, done):
        lanes = lists(self.per_lane(offer["blocks"]))
        self.share(
            done,
            self.twin_tree.insert(offer["tokens"], lanes, namespace=sequence.namespace, receipt=sequence.twin_receipt),
        )
        sequence.runs_on |= done.num_tokens > 0  # otherwise the receipt does not move

    def run_on(self, sequence):
        """`publish_all` for one sequence, by extending its receipt."""
        offer = self.offer(sequence, None)
        lanes = lists(self.per_lane(offer["blocks"]))
        done = self.tree.extend(offer["tokens"], offer["blocks"], sequence.receipt)
        self.share(done, self.twin_tree.extend(offer["tokens"], lanes, sequence.twin_receipt))

    def share(self, done, expected):
        """Give the tree a reference to each block that it took."""
        assert (done.num_tokens, done.num_old_tokens) == (expected["num_tokens"], expected["num_old_tokens"])
        taken = lists(self.per_lane(done.taken))
        assert taken == expected["taken"][:-1]
        assert lists(self.per_lane(done.duplicates)) == expected["duplicates"][:-1]
        for pool, twin, blocks in zip(self.pools, self.twin_pools, taken, strict=True):
            pool.share(blocks)
            twin.share(blocks)

    def hold_nothing(self, sequence):
        """Replace the receipt of a sequence by one of an empty prefix."""
        self.release(sequence.receipt, sequence.twin_receipt)
        sequence.receipt = self.tree.match_and_lock([], namespace=sequence.namespace)
        sequence.twin_receipt = self.twin_tree.match_and_lock([], namespace=sequence.namespace)[1]
        sequence.runs_on = True

    def fork(self, parent):
        try:
            row = self.twin_tables.fork(parent.row)
        except OutOfRows:
            with pytest.raises(OutOfRows):
                self.tables.fork(parent.row)
            return
        assert self.tables.fork(parent.row) == row
        receipts = parent.receipt.fork(), self.twin_tree.fork(parent.twin_receipt)
        self.sequences.append(Sequence(row, list(parent.tokens), parent.namespace, *receipts, parent.runs_on))

    def can_go_on_from(self, sequence, length):
        """Return True if every group still has the block of the last of `length` tokens."""
        at, part = divmod(length, self.block_size)
        return part == 0 or all(self.blocks(sequence, group)[at] for group in self.groups)

    def truncate(self, sequence, length, keep_capacity):
        self.tables.truncate([sequence.row], [length], keep_capacity=keep_capacity)
        self.twin_tables.truncate([sequence.row], [length], keep_capacity=keep_capacity)
        del sequence.tokens[length:]
        sequence.runs_on &= length >= sequence.receipt.num_tokens

    def release_before(self, sequence, group, position):
        freed = self.twin_tables.release_before([sequence.row], group, [position])
        assert self.tables.release_before([sequence.row], group, [position]) == freed

    def remove(self, sequences):
        """Remove rows, then release receipts."""
        rows = [sequence.row for sequence in sequences]
        self.tables.remove(rows)
        self.twin_tables.remove(rows)
        self.tree.release_all([sequence.receipt for sequence in sequences])
        for sequence in sequences:
            self.twin_tree.release(sequence.twin_receipt)
            self.sequences.remove(sequence)

    def take_copies(self, group):
        pairs = self.twin_tables.take_copies(group)
        assert [tuple(pair) for pair in self.tables.take_copies(group).tolist()] == pairs
        return pairs

    # Invariants.

    def evictable_ids(self, group):
        pinned = self.twin_tree.pinned(self.component(group))
        nodes = [node for node in self.twin_tree.nodes() if node not in pinned]
        return {block for node in nodes for block in node.lanes[group] if block}

    def check(self):
        """Check that tree, tables and pools are sound and equal to their twins, and recount all references."""
        self.tree.check_invariants()
        self.tables.check_invariants()
        for name, component in zip(self.tree.components, range(self.twin_tree.num_components), strict=True):
            free = self.twin_tree.evictable(component)
            assert (self.tree.evictable(name), self.tree.protected(name)) == (
                free,
                self.twin_tree.held(component) - free,
            )
        for namespace, tokens, _ in list(self.twin_tree.prefixes()):
            found = self.tree.match(tokens, namespace=namespace)
            expected = self.twin_tree.match(tokens, namespace)[0]
            assert (found.num_tokens, found.num_full_tokens) == (expected["num_tokens"], expected["num_full_tokens"])
            assert lists(self.per_lane(found.blocks)) == expected["blocks"]
        for sequence in self.sequences:
            node = sequence.twin_receipt.node
            assert sequence.receipt.num_tokens == (node.end if node else 0) * self.block_size
        assert self.tree.num_receipts == len(self.sequences)
        for group in self.groups:
            self.check_group(group)

    def check_group(self, group):
        pool, twin = self.pools[group], self.twin_pools[group]
        pool.check_invariants()
        holders = np.zeros(pool.num_blocks, np.int32)
        for row in self.twin_tables.rows.values():
            np.add.at(holders, row.blocks[group], 1)
        holders[0] = 0
        holders[list(self.twin_tree.ids(group))] += 1
        assert (pool.ref_counts() == holders).all()
        assert pool.ref_counts().tolist() == twin.holders
        assert pool.num_free == twin.num_free
        for sequence in self.sequences:
            blocks = self.blocks(sequence, group)
            assert self.tables.blocks(sequence.row, group).tolist() == blocks
            self.check_content(group, blocks, typed(sequence.namespace), sequence.tokens[: self.length(sequence)])
        for space, root in self.twin_tree.roots.items():
            for node in root.children.values():
                self.check_nodes(group, node, space, [])

    def check_nodes(self, group, node, space, tokens):
        """Check that the blocks of every prefix in the tree contain that prefix."""
        for (block_tokens, _), block in zip(node.blocks, node.lanes[group], strict=True):
            tokens = [*tokens, *block_tokens]
            holes = len(tokens) // self.block_size - 1
            self.check_content(group, [0] * holes + [block], space, tokens)
        for child in node.children.values():
            self.check_nodes(group, child, space, tokens)

    def check_content(self, group, blocks, space, tokens):
        for position in range(len(tokens)):
            block = blocks[position // self.block_size]
            if block:
                slot = block * self.block_size + position % self.block_size
                assert self.content[group][slot] == (space, tuple(tokens[: position + 1]))

    def check_only_the_tree_holds_what_can_go(self):
        for group in self.groups:
            rows = {block for row in self.twin_tables.rows.values() for block in row.blocks[group]}
            assert not self.evictable_ids(group) & rows
