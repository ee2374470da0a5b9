"""RadixTree and its plain twin under the same random calls.

Compared is what a user can observe: matches, receipts, results of insertions and evictions, sizes, held ids.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagecore.errors import PagecoreError
from pagecore.index import BlockPool, RadixTree
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.radix_tree import NULL, typed
from tests.reference.radix_tree import RadixTree as TwinTree

POLICIES = ["lru", "lfu", "fifo", "mru", "filo", "slru", "slru:0.4", "priority", "rank"]
NUM_BLOCKS = 1024
PREFIX = "0100110100011011101001011100101101001110"
namespaces = st.sampled_from([None, None, None, "adapter", ("adapter",), 1, True, (1,), ("a", 1.0)])
digests = st.sampled_from([b"cat", b"dog", 5, -5])


class RadixMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 4),
        full=st.integers(0, 2),
        windows=st.lists(st.one_of(st.integers(1, 9), st.tuples(st.integers(0, 5), st.integers(1, 12))), max_size=2),
        sinks=st.lists(st.integers(0, 9), min_size=2, max_size=2),
        states=st.booleans(),
        interval=st.integers(1, 3),
        min_kept=st.integers(0, 4),
        policy=st.sampled_from(POLICIES),
    )
    def make(self, block_size, full, windows, sinks, states, interval, min_kept, policy):
        full = full or int(not windows and not states)
        pairs = [window if isinstance(window, tuple) else (window, 0) for window in windows]
        options = {"full": full, "states": states, "min_kept": min_kept, "policy": policy}
        options |= {"windows": tuple(window for window, _ in pairs), "chunks": tuple(chunk for _, chunk in pairs)}
        options["sinks"] = tuple(0 if chunk else count for (_, chunk), count in zip(pairs, sinks, strict=False))
        if states:
            options["state_interval"] = interval * block_size
        self.tree = RadixTree(block_size, **options)
        self.twin = TwinTree(block_size, **options)
        self.pools = [BlockPool(NUM_BLOCKS, order="fifo") for _ in range(self.twin.num_lanes)]
        self.next_state = 0
        self.receipts = []
        self.time = 0.0

    def draw_key(self, data):
        # A prefix of one long key, sometimes modified: most keys share a prefix.
        tokens = [int(bit) for bit in PREFIX[: data.draw(st.integers(0, 24))]]
        if tokens and data.draw(st.booleans()):
            tokens[data.draw(st.integers(0, len(tokens) - 1))] = 2
        spans = []
        if data.draw(st.integers(0, 7)) == 0:
            start = data.draw(st.integers(0, 12))
            spans = [(start, start + data.draw(st.integers(1, 9)), data.draw(digests))]
        return {
            "tokens": tokens,
            "spans": spans,
            "namespace": data.draw(namespaces) if data.draw(st.integers(0, 7)) == 0 else None,
        }

    def draw_time(self, data):
        self.time += data.draw(st.sampled_from([0.0, 1.0]))
        return data.draw(st.sampled_from([None, self.time]))

    def check_match(self, match, expected):
        lanes = (match.blocks, match.shared_blocks)
        blocks, shared = ([one] if self.twin.num_lanes == 1 else one for one in lanes)
        assert expected == {
            "num_tokens": match.num_tokens,
            "num_full_tokens": match.num_full_tokens,
            "checkpoint": match.checkpoint,
            "state": match.state,
            "blocks": [lane.tolist() for lane in blocks],
            "num_shared_tokens": match.num_shared_tokens,
            "shared_blocks": [lane.tolist() for lane in shared],
        }

    @rule(data=st.data(), most=st.one_of(st.none(), st.integers(0, 30)))
    def match(self, data, most):
        key = self.draw_key(data)
        self.check_match(self.tree.match(**key, max_tokens=most), self.twin.match(**key, max_tokens=most)[0])
        (found,) = self.tree.match_all(
            [key["tokens"]], namespaces=[key["namespace"]], spans=[key["spans"]], max_tokens=[most]
        )
        self.check_match(found, self.twin.match(**key, max_tokens=most)[0])

    @rule(data=st.data(), most=st.one_of(st.none(), st.integers(0, 30)))
    def match_and_lock(self, data, most):
        key, time = self.draw_key(data), self.draw_time(data)
        receipt = self.tree.match_and_lock(**key, max_tokens=most, time=time)
        expected, twin_receipt = self.twin.match_and_lock(**key, max_tokens=most, time=time)
        self.check_match(receipt.match, expected)
        assert receipt.num_tokens == expected["num_tokens"]
        self.receipts.append((receipt, twin_receipt))

    @rule(data=st.data())
    def fork(self, data):
        if self.receipts:
            receipt, twin_receipt = data.draw(st.sampled_from(self.receipts))
            self.receipts.append((receipt.fork(), self.twin.fork(twin_receipt)))

    @rule(data=st.data(), is_whole=st.booleans())
    def release(self, data, is_whole):
        if not self.receipts:
            return
        pair = data.draw(st.sampled_from(self.receipts))
        component = None if is_whole else data.draw(st.integers(0, self.twin.num_components - 1))
        name = None if component is None else self.tree.components[component]
        rank = data.draw(st.sampled_from([None, 1.0, -2.0])) if self.twin.policy == "rank" else None
        self.both(
            lambda: pair[0].release(name, time=(time := self.draw_time(data)), rank=rank) or [time],
            lambda result: self.twin.release(pair[1], component, time=result[0], rank=rank),
            lambda: self.twin.release(pair[1], component, rank=rank),
        )
        if not pair[1].components:
            self.receipts.remove(pair)
            with pytest.raises(PagecoreError):
                pair[0].release()

    def both(self, act, follow, refuse):
        try:
            result = act()
        except PagecoreError as error:
            with pytest.raises(type(error)):
                refuse()
            return None
        follow(result)
        return result

    def draw_lanes(self, data, key):
        """Draw the blocks that a sequence offers: those it matched, then its own; windows have holes."""
        size = len(key["tokens"]) // self.twin.block_size
        lanes = []
        reused = self.twin.match(**key)[0]["blocks"] if data.draw(st.booleans()) else [[]] * self.twin.num_lanes
        for lane, pool in enumerate(self.pools):
            fresh = pool.allocate(size - len(reused[lane])).tolist()
            own = [*reused[lane], *fresh]
            if lane >= self.twin.full:
                holes = data.draw(st.integers(0, size))
                own = [0 if i < holes else block for i, block in enumerate(own)]
                pool.free([block for block in fresh if block not in own])
            elif own and data.draw(st.integers(0, 15)) == 0:
                held = sorted(self.twin.ids(lane))
                wrong = data.draw(st.sampled_from([0, -1, *held]))
                if wrong not in own:
                    fresh = [block for block in fresh if block != own[-1]] if own[-1] in fresh else fresh
                    if len(fresh) < size - len(reused[lane]):
                        pool.free(own[-1])
                    own[-1] = wrong
            lanes.append((own, [block for block in fresh if block in own]))
        return [own for own, _ in lanes], [fresh for _, fresh in lanes]

    def draw_states(self, data, key):
        if not self.twin.states:
            return []
        blocks = len(key["tokens"]) // self.twin.block_size
        ends = data.draw(
            st.lists(st.integers(0 if data.draw(st.integers(0, 9)) == 0 else 1, max(1, blocks)), max_size=3)
        )
        states = []
        for end in sorted(set(ends)):
            self.next_state += 1
            states.append((end * self.twin.block_size, self.next_state))
        return states

    def draw_hint(self, data):
        hint = {"time": self.draw_time(data)}
        if self.twin.policy == "rank":
            hint["rank"] = data.draw(st.sampled_from([None, 0.5, -1.0, 3.0]))
        if self.twin.policy == "priority":
            hint["priority"] = data.draw(st.sampled_from([None, 0, 20, 35, 80, 100]))
            if hint["priority"] is not None and hint["time"] is not None:
                hint["time_to_live"] = data.draw(st.sampled_from([None, 0.0, 1.0, 3.0]))
        return hint

    @rule(data=st.data(), with_receipt=st.booleans(), in_batch=st.booleans())
    def insert(self, data, with_receipt, in_batch):
        key = self.draw_key(data)
        lanes, fresh = self.draw_lanes(data, key)
        states, hint = self.draw_states(data, key), self.draw_hint(data)
        receipt, twin_receipt = None, None
        if with_receipt and self.receipts:
            receipt, twin_receipt = data.draw(st.sampled_from(self.receipts))
        blocks = lanes[0] if len(lanes) == 1 else lanes
        sizes = self.figures()
        try:
            expected = self.twin.insert(lanes=lanes, states=states, receipt=twin_receipt, **key, **hint)
        except PagecoreError as error:
            with pytest.raises(type(error)):
                self.tree.insert(blocks=blocks, states=states, receipt=receipt, **key, **hint)
            assert self.figures() == sizes
        else:
            if in_batch:
                time = hint.pop("time")
                entry = {"blocks": blocks, "states": states, "receipt": receipt, **key, **hint}
                (done,) = self.tree.insert_all([entry], time=time)
            else:
                done = self.tree.insert(blocks=blocks, states=states, receipt=receipt, **key, **hint)
            assert (done.num_tokens, done.num_old_tokens) == (expected["num_tokens"], expected["num_old_tokens"])
            taken = self.lists(done.taken, done.taken_states)
            assert taken == expected["taken"]
            assert self.lists(done.duplicates, done.duplicate_states) == expected["duplicates"]
            for pool, ids in zip(self.pools, taken, strict=False):
                pool.share(ids)
        for pool, ids in zip(self.pools, fresh, strict=True):
            pool.free(ids)  # the sequence ends

    def draw_more(self, data, held):
        """Draw tokens that follow a receipt: those of the long key, or others."""
        count = data.draw(st.integers(0, 3 * self.twin.block_size))
        if data.draw(st.booleans()):
            return [int(bit) for bit in PREFIX[len(held) : len(held) + count]]
        return data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))

    @rule(data=st.data(), times=st.integers(1, 4), is_wrong=st.integers(0, 9).map(lambda one: one == 0))
    def extend(self, data, times, is_wrong):
        if not self.receipts:
            return
        receipt, twin_receipt = data.draw(st.sampled_from(self.receipts))
        for _ in range(times):
            path = reversed(twin_receipt.node.path()) if twin_receipt.node else []
            held = [token for node in path for tokens, _ in node.blocks for token in tokens]
            done = len(held) // self.twin.block_size
            more = self.draw_more(data, held)
            size = len(more) // self.twin.block_size
            fresh = [pool.allocate(size).tolist() for pool in self.pools]
            lanes = [[-9] * done + ids for ids in fresh]  # blocks that the receipt pins are ignored
            for lane in lanes[self.twin.full :]:
                for i in data.draw(st.sets(st.integers(done, len(lane) - 1), max_size=2)) if size else ():
                    lane[i] = 0
            tokens = data.draw(st.sampled_from([held, [-9] * len(held)])) + more
            if is_wrong and size and lanes:
                lanes[0][-1] = data.draw(st.sampled_from([0, -1, *sorted(self.twin.ids(0))]))
            if is_wrong and held and not size:
                tokens = tokens[1 : len(held)]
            self.check_extension(tokens, lanes, receipt, twin_receipt, self.draw_time(data))
            for pool, ids in zip(self.pools, fresh, strict=True):
                pool.free(ids)

    def check_extension(self, tokens, lanes, receipt, twin_receipt, time):
        sizes = self.figures()
        blocks = lanes[0] if len(lanes) == 1 else lanes
        try:
            expected = self.twin.extend(tokens, lanes, twin_receipt, time)
        except PagecoreError as error:
            with pytest.raises(type(error)):
                self.tree.extend(tokens, blocks, receipt, time=time)
            assert self.figures() == sizes
            return
        done = self.tree.extend(tokens, blocks, receipt, time=time)
        assert (done.num_tokens, done.num_old_tokens) == (expected["num_tokens"], expected["num_old_tokens"])
        assert receipt.num_tokens == done.num_tokens
        assert receipt.components == tuple(self.tree.components[c] for c in sorted(twin_receipt.components))
        assert self.lists(done.taken, done.taken_states) == expected["taken"]
        assert self.lists(done.duplicates, done.duplicate_states) == expected["duplicates"]
        for pool, ids in zip(self.pools, expected["taken"], strict=False):
            pool.share(ids)

    def lists(self, blocks, states):
        lanes = [blocks] if self.twin.num_lanes == 1 else list(blocks)
        return [ids.tolist() for ids in (*lanes, states)]

    @rule(data=st.data())
    def replace(self, data):
        held = [pair for pair in self.receipts if pair[1].node is not None]
        if not held or not self.twin.num_lanes:
            return
        receipt, twin_receipt = data.draw(st.sampled_from(held))
        lane = data.draw(st.integers(0, self.twin.num_lanes - 1))
        index = data.draw(st.integers(0, twin_receipt.node.end))
        others = [-1, NULL, *sorted(self.twin.ids(lane))[:2]]
        fresh = int(self.pools[lane].allocate(1)[0])
        block = data.draw(st.sampled_from([fresh, fresh, fresh, *others]))

        def act():
            assert self.tree.block_at(receipt, index, lane) == self.twin.block_at(twin_receipt, index, lane)
            return [self.tree.replace(receipt, index, block, lane)]

        done = self.both(
            act,
            lambda old: [self.twin.replace(twin_receipt, index, block, lane)] == old or pytest.fail("another block"),
            lambda: [
                self.twin.block_at(twin_receipt, index, lane),
                self.twin.replace(twin_receipt, index, block, lane),
            ],
        )
        if done is not None and done[0] not in (NULL, block):
            self.pools[lane].free(done[0])
        if done is None or block != fresh:
            self.pools[lane].free(fresh)

    @rule(data=st.data(), amount=st.one_of(st.integers(0, 6), st.just(10**12)))
    def evict(self, data, amount):
        component = data.draw(st.integers(0, self.twin.num_components - 1))
        time = self.draw_time(data)
        gone = self.tree.evict(self.tree.components[component], amount, time=time)
        expected, ids = self.twin.evict(component, amount, time)
        assert gone.amount == expected
        assert self.lists(gone.blocks, gone.states) == ids
        for pool, freed in zip(self.pools, ids, strict=False):
            assert pool.free(freed) == len(freed)

    @precondition(lambda self: hasattr(self, "twin"))
    @rule(data=st.data())
    def evict_path(self, data):
        known = [
            {"tokens": [*tokens, 3], "spans": spans, "namespace": namespace}
            for namespace, tokens, spans in self.twin.prefixes()
        ]
        key = data.draw(st.sampled_from([*known, self.draw_key(data)]))
        keep = data.draw(st.integers(0, len(key["tokens"])))
        gone = self.tree.evict_path(keep=keep, **key)
        expected, ids = self.twin.evict_path(keep=keep, **key)
        assert gone.amount == expected
        assert self.lists(gone.blocks, gone.states) == ids
        for pool, freed in zip(self.pools, ids, strict=False):
            assert pool.free(freed) == len(freed)

    @precondition(lambda self: hasattr(self, "twin"))
    @rule(data=st.data())
    def revoke(self, data):
        known = [
            {"tokens": [*tokens, 3], "spans": spans, "namespace": namespace}
            for namespace, tokens, spans in self.twin.prefixes()
        ]
        key = data.draw(st.sampled_from([*known, self.draw_key(data)]))
        valid = data.draw(st.integers(0, len(key["tokens"])))
        pairs = [pair for pair in self.receipts if data.draw(st.integers(0, 5))]
        gone = self.tree.revoke(valid=valid, receipts=[receipt for receipt, _ in pairs], **key)
        expected, ids = self.twin.revoke(valid=valid, receipts=[twin for _, twin in pairs], **key)
        assert gone.amount == expected
        assert [receipt.num_tokens for receipt, _ in pairs] == [
            0 if twin.node is None else twin.node.end * self.twin.block_size for _, twin in pairs
        ]
        evicted = self.lists(gone.blocks, gone.states)
        assert [sorted(each) for each in evicted] == [sorted(each) for each in ids]
        for pool, freed in zip(self.pools, ids, strict=False):
            assert pool.free(freed) == len(freed)

    @precondition(lambda self: hasattr(self, "twin"))
    @rule(data=st.data())
    def evict_namespace(self, data):
        names = [namespace for namespace, _, _ in self.twin.prefixes()]
        namespace = data.draw(st.sampled_from([*names, self.draw_key(data)["namespace"]]))
        gone = self.tree.evict_namespace(namespace)
        expected, ids = self.twin.evict_namespace(namespace)
        assert gone.amount == expected
        evicted = self.lists(gone.blocks, gone.states)
        assert [sorted(each) for each in evicted] == [sorted(each) for each in ids]
        for pool, freed in zip(self.pools, ids, strict=False):
            assert pool.free(freed) == len(freed)

    def figures(self):
        return [(self.tree.evictable(name), self.tree.protected(name)) for name in self.tree.components]

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "tree"):
            return
        self.tree.check_invariants()
        twin = self.twin
        evictable = [twin.evictable(c) for c in range(twin.num_components)]
        assert self.figures() == [(free, twin.held(c) - free) for c, free in enumerate(evictable)]
        for namespace, tokens, spans in list(twin.prefixes()):
            key = {"tokens": tokens, "spans": spans, "namespace": namespace}
            self.check_match(self.tree.match(**key), twin.match(**key)[0])
        for receipt, twin_receipt in self.receipts:
            assert receipt.num_tokens == (twin_receipt.node.end if twin_receipt.node else 0) * twin.block_size
            assert receipt.components == tuple(self.tree.components[c] for c in sorted(twin_receipt.components))
        assert self.tree.num_receipts == len(twin.receipts) == len(self.receipts)
        for lane, pool in enumerate(self.pools):  # only the tree holds blocks now, one reference each
            held = np.zeros(NUM_BLOCKS, np.int32)
            held[list(twin.ids(lane))] = 1
            assert (pool.ref_counts() == held).all()
            assert self.tree.held_blocks(lane).tolist() == sorted(twin.ids(lane))
        assert self.tree.held_states().tolist() == sorted(twin.ids(twin.num_lanes))
        used = {key for key, root in twin.roots.items() if root.children} - {typed(None)}
        assert self.tree.num_namespaces == len(used)


TestRadixAgainstTwin = pytest.mark.slow(drawn(RadixMachine))
TestRadixAgainstTwin.settings = settings(max_examples=60 if is_full() else 26, stateful_step_count=30, deadline=None)
