"""Rules of a host tier for the state machines of caches: promotion, backup, loads, holds, and planted failures.

The machines compute key, value and state of a token from all ids before it and from its namespace, so that an entry
that was promoted for another prefix, or overwritten on its way, is detected.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from pagecore import StateSpec
from pagecore.cache import SwapSpace
from pagecore.errors import DeviceError
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.test_prefix_machine import BLOCK, NAMES, Twin

PATTERN = [int(bit) for bit in "010011010001101110100101"]
WRITES = [None, "through", "through", "second_hit", "on_release", "on_evict", "on_evict", "explicit"]


def prefix(length, strays):
    ids = PATTERN[:length]
    if strays < length:
        ids[strays] = 2
    return ids


class TierRules:
    """A mixin for machines with `cache`, `layers` and `twins`; their `make` calls `start_tier`."""

    def start_tier(self, num_blocks, write, shares, **options):
        self.tier = HostTier(self.cache, num_blocks=num_blocks, huge_pages=False, **options)
        self.tiers = None if write is None else Tiers(self.cache, self.tier, write=write, min_tokens=BLOCK)
        if shares:
            self.space = SwapSpace(self.cache, host=self.tier)
        self.leases, self.holds = [], []

    def poison(self):
        if not self.cache.scrub:
            super().poison()
        pools = [*self.tier.kv_pools, *([self.tier.state_pool] if self.tier.state_pool else [])]
        for blocks, bytes_of in zip(self.tier.block_pools, pools, strict=True):
            free = blocks.ref_counts() == 0
            free[0] = False
            for plane in bytes_of.planes():
                plane.numpy()[free] = np.nan if str(plane.dtype) == "float32" else 77

    @precondition(lambda self: not self.is_full())
    @rule(length=st.integers(0, 24), strays=st.integers(0, 60), namespace=NAMES, most=st.sampled_from([None, None, 5]))
    def add(self, length, strays, namespace, most):
        """A tier makes the reused prefix longer than the device's, unless there is no room for it."""
        ids = prefix(length, strays)
        device, _ = self.tier.match_both(ids, namespace=namespace, max_tokens=most)
        sequence = self.cache.add_sequence(ids, namespace=namespace, max_tokens=most)
        twin = self.twins[sequence] = Twin(namespace, ids)
        twin.computed = sequence.num_cached_tokens
        assert device <= twin.computed <= max(0, length - 1)
        assert twin.computed % BLOCK == 0
        assert most is None or twin.computed <= most
        assert self.tiers is not None or twin.computed == device

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def back_up(self, data):
        self.poison()
        sequences = self.pick(data, self.resident(), most=3)
        self.tier.backup(sequences)
        self.poison()
        for ended in self.tier.poll():
            assert ended.error is None
            assert 0 <= ended.start <= ended.stop == len(ended.tokens)
            assert ended.start % BLOCK == ended.stop % BLOCK == 0

    @precondition(lambda self: not self.is_full())
    @rule(length=st.integers(8, 24), strays=st.integers(0, 60), namespace=NAMES, clears=st.integers(0, 2))
    def serve(self, length, strays, namespace, clears):
        """Compute a prompt, remove its sequence, and often take what it leaves from the device."""
        ids = prefix(length, strays)
        sequence = self.cache.add_sequence(ids, namespace=namespace)
        twin = self.twins[sequence] = Twin(namespace, ids)
        twin.computed = sequence.num_cached_tokens
        self.check_bytes(sequence)
        # In two steps: a state is kept at the end of the first.
        for end in (length // 8 * 8, length):
            counts = [end - twin.computed]
            if counts[0] <= 0 or self.is_refused([sequence], counts):
                continue
            batch = self.cache.prepare([sequence], counts)
            self.poison()
            self.forward(batch, [sequence], counts)
            self.cache.commit(batch)
            twin.computed = end
        self.tier.backup(sequence)
        self.poison()
        self.cache.remove(sequence)
        del self.twins[sequence]
        if clears:
            self.cache.clear_prefix_cache()
            self.poison()

    @rule(length=st.integers(0, 24), strays=st.integers(0, 60), namespace=NAMES, least=st.sampled_from([1, 1, 12]))
    def promote(self, length, strays, namespace, least):
        ids = prefix(length, strays)
        device, host = self.tier.match_both(ids, namespace=namespace)
        now = self.tier.promote(ids, namespace=namespace, min_tokens=least)
        assert now == self.tier.match_both(ids, namespace=namespace)[0]
        if host - device < least:
            assert now == device
        self.poison()

    @rule(length=st.integers(4, 24), strays=st.integers(0, 60), namespace=NAMES)
    def promotion_that_fails(self, length, strays, namespace):
        """A failed copy publishes nothing on the device, and the host keeps what it has."""
        ids = prefix(length, strays)
        before = self.tier.match_both(ids, namespace=namespace)
        self.fail(lambda: self.tier.promote(ids, namespace=namespace))
        after = self.tier.match_both(ids, namespace=namespace)
        assert after[1] == before[1]
        assert after[0] <= before[0]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def backup_that_fails(self, data):
        (sequence,) = self.pick(data, self.resident())
        self.fail(lambda: self.tier.backup(sequence))

    def fail(self, call):
        copies = self.tier._transfers.copies
        run = copies.run

        def broken(pairs, **options):
            run([each[: len(each) // 2] for each in pairs], **options)
            raise DeviceError("planted")

        copies.run = broken
        try:
            call()
        except DeviceError:
            pass
        finally:
            copies.run = run
        self.poison()

    @rule(length=st.integers(0, 24), strays=st.integers(0, 60), namespace=NAMES)
    def load(self, length, strays, namespace):
        """Load entries as a store does: hold what is there, reserve the rest, fill it, adopt it."""
        twin = Twin(namespace, prefix(length, strays))
        with self.tier.hold(twin.ids, namespace=namespace) as held:
            places = list(range(held.num_tokens // BLOCK, length // BLOCK))
            ends = places[-1:] if self.tier.state_pool else []
            num_groups = len(self.tier.kv_pools)
            lease = self.tier.reserve([places] * num_groups + [ends] * (self.tier.num_lanes - num_groups))
            if lease is None:
                return
            self.tier.check_invariants()
            for layer, spec in enumerate(self.layers):
                self.fill_entries(twin, layer, spec, places, ends, lease.blocks)
            arrived = len(places) if strays % 3 else len(places) // 2
            ok = [np.arange(len(each)) < arrived for each in lease.positions]
            before = self.tier.match_both([*twin.ids, 0], namespace=namespace)[1]
            found = self.tier.adopt(lease, twin.ids, namespace=namespace, ok=ok)
            assert found >= before
            assert not lease.is_held

    def fill_entries(self, twin, layer, spec, places, ends, blocks):
        where = self.cache._parts.layers[layer]
        if isinstance(spec, StateSpec):
            for end, slot in zip(ends, blocks[-1].tolist(), strict=True):
                for plane in spec.planes:
                    stored = self.stored_state((layer, plane.name), plane.shape, twin, (end + 1) * BLOCK)
                    for name, values in stored.items():
                        self.tier.state_pool.plane(name, where.index).numpy()[slot] = values
            return
        pool = self.tier.kv_pools[where.group]
        for place, block in zip(places, blocks[where.group].tolist(), strict=True):
            key, value = twin.stored(layer, spec, place * BLOCK, (place + 1) * BLOCK)
            pool.key(where.index).numpy()[block] = key
            pool.value(where.index).numpy()[block] = value

    @rule(length=st.integers(0, 24), strays=st.integers(0, 60), namespace=NAMES, count=st.integers(0, 3))
    def hold(self, length, strays, namespace, count):
        self.holds.append(self.tier.hold(prefix(length, strays), namespace=namespace))
        lease = self.tier.reserve([range(count)] * self.tier.num_lanes)
        if lease is not None:
            self.leases.append(lease)
        assert self.tier.num_holds == len(self.holds)

    @precondition(lambda self: self.holds)
    @rule()
    def let_go(self):
        self.holds.pop().release()
        if self.leases:
            self.leases.pop().release()

    @rule()
    def forget(self):
        """Collect a lease and a hold that were never released."""
        if self.holds:
            self.holds.pop()
        if self.leases:
            self.leases.pop()

    @rule(length=st.integers(0, 24), strays=st.integers(0, 60), namespace=NAMES, keep=st.integers(0, 12))
    def evict_prefix(self, length, strays, namespace, keep):
        """Evict from the host alone, or from both; prefixes that begin otherwise keep what they have."""
        ids, names = prefix(length, strays), {"namespace": namespace}
        paths = [(prefix(24, other), name) for other in (0, 5, 9, 60) for name in (None, "a")]
        before = [self.tier.match_both(path, namespace=name) for path, name in paths]
        if self.tiers is None or keep % 2:
            freed = self.tier.evict_prefix(ids, keep=keep, **names)
        else:
            freed = self.tiers.evict_prefix(ids, keep=keep, **names)
        assert freed >= 0
        after = [self.tier.match_both(path, namespace=name) for path, name in paths]
        for (path, name), old, new in zip(paths, before, after, strict=True):
            if name != namespace or path[:BLOCK] != ids[:BLOCK]:
                assert new == old
            assert all(one <= other for one, other in zip(new, old, strict=True))
        if not self.holds and not self.twins and self.tier.state_pool is None:
            assert self.tier.path_length(ids, **names) <= max(-(-keep // BLOCK) * BLOCK, length)
        self.poison()

    @rule(length=st.integers(0, 24), strays=st.integers(0, 60), namespace=NAMES, valid=st.integers(0, 24))
    def revoke_prefix(self, length, strays, namespace, valid):
        ids, names = prefix(length, strays), {"namespace": namespace}
        left = valid // BLOCK * BLOCK
        if self.tiers is None or valid % 2:
            assert self.tier.revoke_prefix(ids, valid=valid, **names) >= 0
        else:
            lengths = [pin.num_tokens for pin, _, _ in self.pins]
            affected = self.tiers.revoke_prefix(ids, valid=valid, **names)
            self.release_shortened(lengths)
            assert set(affected.values()) <= set(range(left + 1))
            assert left + BLOCK > length or max(self.tier.match_both([*ids, 9], **names)) <= left
        self.poison()

    @rule()
    def clear_host(self):
        self.tier.clear()

    @invariant()
    def has_right_bytes(self):
        if not hasattr(self, "tier"):
            return
        self.tier.check_invariants()
        assert self.tier.stats().num_pending == 0
        for sequence in self.resident():
            self.check_bytes(sequence)

    def check_bytes(self, sequence):
        """Compare the blocks that a sequence took from a cached prefix with the bytes of its own tokens."""
        twin, whole = self.twins[sequence], sequence.num_cached_tokens // BLOCK
        if sequence.num_computed_tokens < whole * BLOCK:
            return
        for layer, spec in enumerate(self.layers):
            if isinstance(spec, StateSpec):
                continue
            group = self.cache._parts.layers[layer].group
            row = self.cache._parts.tables.table(group)[sequence.row, :whole]
            for index, block in enumerate(row.tolist()):
                if block:
                    sides = twin.stored(layer, spec, index * BLOCK, (index + 1) * BLOCK)
                    for name, side in zip(("key", "value"), sides, strict=True):
                        assert np.array_equal(self.cache.plane(name, layer).numpy()[block], side)

    def teardown(self):
        if not hasattr(self, "tier"):
            return
        for held in [*self.leases, *self.holds]:
            held.release()
        super().teardown()
        assert (self.tier.num_leases, self.tier.num_holds) == (0, 0)
        self.tier.clear()
        assert all(pool.num_used == 0 for pool in self.tier.block_pools)
        assert self.cache._parts.prefix.transfers == set()
        (self.tiers or self.tier).close()
