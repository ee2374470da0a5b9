"""Plain-Python twin of PagedKVCache for the scheduler; it counts blocks and stores no bytes."""

from collections import Counter

import numpy as np

from pagecore import AttentionSpec
from pagecore.errors import InvalidSequence, OutOfBlocks, OutOfRows, ShapeError


class FakeSequence:
    def __init__(self, tokens, id=None, block_size=1):
        self.id, self.block_size = id, block_size
        self.ids = [int(token) for token in tokens]
        self.blocks = []
        self.num_computed_tokens = self.num_cached_tokens = self.num_matched_tokens = 0
        self.space = None
        self.namespace = None
        # Prefixes of this sequence in the tree, which it pins.
        self.hold = []

    @property
    def is_swapped(self):
        return self.space is not None

    @property
    def num_tokens(self):
        return len(self.ids)

    @property
    def capacity(self):
        return len(self.blocks) * self.block_size

    @property
    def tokens(self):
        return np.array(self.ids, dtype=np.int32)


class FakeSpace:
    """Counts of the blocks that swapped sequences hold; `num_blocks` includes the null block."""

    def __init__(self, cache, num_blocks):
        self.cache = cache
        self.num_blocks = num_blocks
        self.held = {}

    @property
    def num_free(self):
        return self.num_blocks - 1 - sum(self.held.values())

    num_available = num_free


class FakeBatch:
    def __init__(self, max_sequences, max_tokens):
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.pending = []
        self.num_tokens = 0
        self.num_sequences = 0
        self.in_flight = False


class FakeCache:
    """Plain-Python cache of blocks; `num_blocks` includes the null block.

    The prefix cache is a dictionary from a prefix of full blocks to its last block. A prefix that no sequence pins can
    be evicted: the least recently used first, and the longest of those used at the same time. If every sequence that
    pins a prefix has its own copy of the block, the block of the tree is available too: one of the copies replaces it.
    """

    num_states = 0
    num_layers = num_groups = 1
    has_tiers = False

    def __init__(self, num_blocks, block_size=4, max_sequences=8, max_tokens_per_sequence=None, prefix_cache=True):
        self.has_prefix_cache = prefix_cache
        self.block_size = block_size
        self.max_sequences = max_sequences
        self.max_tokens_per_sequence = max_tokens_per_sequence or (num_blocks - 1) * block_size
        self.holders = [0] * num_blocks
        self.free = list(range(num_blocks - 1, 0, -1))
        self.sequences = {}
        self.copies = 0
        self.prepared = []
        self.tree = {}
        self.used = {}
        self.holds = Counter()
        self.evicted = self.time = 0

    @property
    def num_available(self):
        return len(self.free) + len(self.evictable)

    @property
    def max_length(self):
        return min(self.num_available * self.block_size, self.max_tokens_per_sequence)

    @property
    def max_step_tokens(self):
        return self.max_length

    @property
    def evictable(self):
        return [key for key, block in self.tree.items() if self.holders[block] == 1]

    def lose(self):
        """Take every available block, as a holder outside the scheduler would."""
        while self.num_available:
            self._take()

    def make_batch(self, max_sequences, max_tokens):
        return FakeBatch(max_sequences, max_tokens)

    def add_sequence(self, tokens, id=None, *, namespace=None, max_tokens=None, spans=None, tentative=False):
        # Token ids inside of a span differ by its digest.
        self._take_row()
        assert id not in self.sequences
        sequence = FakeSequence(tokens, id, self.block_size)
        sequence.namespace = namespace
        matched = self.match_length(tokens, namespace=namespace, max_tokens=max_tokens)
        for count in range(1, matched // self.block_size + 1):
            self._hold(sequence, self._key(sequence, count))
            sequence.blocks.append(self.tree[sequence.hold[-1]])
            self.holders[sequence.blocks[-1]] += 1
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(sequence.blocks) * self.block_size
        sequence.num_matched_tokens = sequence.num_cached_tokens
        self.sequences[id] = sequence
        return sequence

    def match_length(self, tokens, *, namespace=None, max_tokens=None, spans=None):
        found = FakeSequence(tokens)
        found.namespace = namespace
        count, most = 0, len(tokens) - 1 if max_tokens is None else min(max_tokens, len(tokens) - 1)
        while (count + 1) * self.block_size <= most and self._key(found, count + 1) in self.tree:
            count += 1
        return count * self.block_size

    def _key(self, sequence, num_blocks):
        return sequence.namespace, tuple(sequence.ids[: num_blocks * self.block_size])

    def _hold(self, sequence, key):
        sequence.hold.append(key)
        self.holds[key] += 1
        self.time += 1
        self.used[key] = self.time

    def _publish(self, sequence):
        """Add the full computed blocks to the tree; duplicates of prefixes in the tree stay with the sequence alone."""
        whole = min(sequence.num_tokens, sequence.num_computed_tokens) // self.block_size
        for count in range(len(sequence.hold) + 1, whole + 1 if self.has_prefix_cache else 0):
            key, block = self._key(sequence, count), sequence.blocks[count - 1]
            if key not in self.tree:
                self.tree[key] = block
                self.holders[block] += 1
            self._hold(sequence, key)

    def _release(self, sequence):
        for key in reversed(sequence.hold):
            self.holds[key] -= 1
            self.time += 1
            self.used[key] = self.time
        sequence.hold = []

    def _take_row(self):
        if sum(not sequence.is_swapped for sequence in self.sequences.values()) == self.max_sequences:
            raise OutOfRows("no row left")

    def _known(self, sequence, swapped=False):
        if self.sequences.get(sequence.id) is not sequence or sequence.is_swapped != swapped:
            raise InvalidSequence("the sequence was removed, belongs to another cache, or is in the other memory")

    def _need(self, sequence, count, touched):
        """Return the number of new blocks, and the indices of shared blocks to copy before they are written."""
        if sequence.is_swapped:
            # After swap-in it has its own blocks.
            return -(-(sequence.num_computed_tokens + count) // self.block_size), []
        self._known(sequence)
        start = sequence.num_computed_tokens
        last = -(-(start + count) // self.block_size)
        new = max(last - len(sequence.blocks), 0)
        copies = []
        if count:
            for index in range(start // self.block_size, min(last, len(sequence.blocks))):
                block = sequence.blocks[index]
                if self.holders[block] - touched.get(block, 0) > 1:
                    touched[block] = touched.get(block, 0) + 1
                    copies.append(index)
        return new, copies

    def _needs(self, sequences, counts):
        assert len(sequences) == len(counts)
        assert len({id(sequence) for sequence in sequences}) == len(sequences)
        touched = {}
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence.num_computed_tokens + count > self.max_tokens_per_sequence:
                raise ShapeError("past the row")
        return [self._need(sequence, count, touched) for sequence, count in zip(sequences, counts, strict=True)]

    def shortage(self, sequences, counts, step_tokens=None):
        # There are no windows: the blocks do not depend on the steps.
        total = sum(new + len(copies) for new, copies in self._needs(sequences, counts))
        return max(total - self.num_available, 0)

    def shortages(self, sequences, counts, step_tokens=None):
        return [self.shortage(sequences, counts)]

    def spec(self, layer):
        return AttentionSpec(1, 8)

    def group_of(self, layer):
        return 0

    def try_prepare(self, sequences, counts, out, draft_ids=None):
        assert not out.in_flight, "the previous batch was neither committed nor abandoned"
        assert sequences, "an empty step"
        assert sum(counts) <= out.max_tokens
        assert len(sequences) <= out.max_sequences
        for sequence, count in zip(sequences, counts, strict=True):
            self._known(sequence)
            # The id of the last token may follow: a step ahead of the ids of the step before. So may drafts.
            known = sequence.num_tokens - sequence.num_computed_tokens
            assert 1 <= count <= max(known, 1) or known <= 1, "a count past the known ids"
        needs = self._needs(sequences, counts)
        if sum(new + len(copies) for new, copies in needs) > self.num_available:
            return None
        for sequence, (new, copies) in zip(sequences, needs, strict=True):
            for index in copies:
                self.holders[sequence.blocks[index]] -= 1
                sequence.blocks[index] = self._take()
                self.copies += 1
            sequence.blocks += [self._take() for _ in range(new)]
        out.in_flight = True
        out.pending = list(zip(sequences, counts, strict=True))
        out.num_tokens, out.num_sequences = sum(counts), len(sequences)
        out.token_ids = []
        for sequence, count, given in zip(sequences, counts, draft_ids or [None] * len(counts), strict=True):
            start = sequence.num_computed_tokens
            ids = sequence.ids[start : start + count]
            drafts = [] if given is None else list(given)
            assert len(ids) + len(drafts) <= count
            out.token_ids += ids + [-1] * (count - len(ids) - len(drafts)) + drafts
        self.prepared.append((list(sequences), list(counts)))
        return out

    def prepare(self, sequences, counts, out):
        batch = self.try_prepare(sequences, counts, out)
        if batch is None:
            raise OutOfBlocks("out of blocks", 1, 0)
        return batch

    def _take(self):
        if not self.free:
            key = min(self.evictable, key=lambda one: (self.holds[one] > 0, self.used[one], -len(one[1])))
            block = self.tree.pop(key)
            for owner in (one for one in self.sequences.values() if key in one.hold):
                self.tree[key] = owner.blocks[len(key[1]) // self.block_size - 1]
                self.holders[self.tree[key]] += 1
                break
            else:
                self.evicted += 1
            self._drop([block])
        block = self.free.pop()
        self.holders[block] = 1
        return block

    def commit(self, batch, accepted=None):
        assert batch.in_flight
        counts = [count for _, count in batch.pending] if accepted is None else accepted
        for (sequence, most), count in zip(batch.pending, counts, strict=True):
            assert 0 <= count <= most
            if self.sequences.get(sequence.id) is sequence:
                sequence.num_computed_tokens += count
                self._publish(sequence)
        batch.pending, batch.in_flight = [], False

    def truncate(self, sequences, lengths):
        """Forget the tokens past a length, and release spare blocks."""
        for sequence, length in zip(sequences, lengths, strict=True):
            self._known(sequence)
            assert 0 <= length <= max(sequence.num_tokens, sequence.num_computed_tokens)
            del sequence.ids[length:]
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, length)
            for key in sequence.hold[length // self.block_size :]:
                self.holds[key] -= 1
            del sequence.hold[length // self.block_size :]
            keep = -(-sequence.num_computed_tokens // self.block_size)
            self._drop(sequence.blocks[keep:])
            del sequence.blocks[keep:]

    def abandon(self, batch):
        assert batch.in_flight
        for sequence, _ in batch.pending:
            keep = -(-sequence.num_computed_tokens // self.block_size)
            self._drop(sequence.blocks[keep:])
            del sequence.blocks[keep:]
        batch.pending, batch.in_flight = [], False

    def try_swap_out(self, sequences, space):
        (sequence,) = sequences
        self._known(sequence)
        count = -(-sequence.num_computed_tokens // self.block_size)
        if count > space.num_free:
            return False
        space.held[sequence] = count
        sequence.space = space
        self._publish(sequence)
        self._drop(sequence.blocks)
        self._release(sequence)
        sequence.blocks = []
        return True

    def swap_in(self, sequences):
        (sequence,) = sequences
        self._known(sequence, swapped=True)
        count = sequence.space.held[sequence]
        self._take_row()
        if count > self.num_available:
            raise OutOfBlocks("out of blocks", count, self.num_available)
        del sequence.space.held[sequence]
        sequence.space = None
        sequence.blocks = [self._take() for _ in range(count)]

    def append_tokens(self, sequences, ids, counts=None):
        assert len(sequences) == len(ids)
        if counts is not None:
            assert np.min(counts) > 0
            ids = [row[:count] for row, count in zip(ids, counts, strict=True)]
        for sequence, some in zip(sequences, ids, strict=True):
            if not sequence.is_swapped:
                self._known(sequence)
            sequence.ids += [int(token) for token in np.atleast_1d(some)]

    def fork(self, sequence, id=None):
        self._known(sequence)
        self._take_row()
        assert id not in self.sequences
        child = FakeSequence(sequence.ids, id, self.block_size)
        child.namespace = sequence.namespace
        child.num_computed_tokens, child.num_cached_tokens = sequence.num_computed_tokens, sequence.num_cached_tokens
        child.blocks = list(sequence.blocks)
        for block in child.blocks:
            self.holders[block] += 1
        self._publish(sequence)
        for key in sequence.hold:
            self._hold(child, key)
        self.sequences[id] = child
        return child

    def remove(self, sequence):
        self._known(sequence, swapped=sequence.is_swapped)
        del self.sequences[sequence.id]
        if sequence.is_swapped:
            del sequence.space.held[sequence]
        else:
            self._publish(sequence)
        self._drop(sequence.blocks)
        self._release(sequence)
        sequence.blocks = []

    def _drop(self, blocks):
        for block in reversed(blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.append(block)
