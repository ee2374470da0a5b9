"""Caches with sealed blocks on CUDA, against host caches that live the same life, and on streams of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.errors import DeviceError
from pagecore.tiers.host.tier import HostTier
from tests.cache.test_sealed_walks import MODELS, Walk, run_walk
from tests.cuda.caches import DeviceBytes, DeviceCache, requests_of
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases

BLOCK = 16
SPEC = AttentionSpec(
    2, 32, 16, dtype="bfloat16", num_query_heads=4, format="kivi2", residual=20, group_size=16, block_size=BLOCK
)
FULL = AttentionSpec(2, 32, 16, dtype="bfloat16", num_query_heads=4)


class Host:
    """The part of `Kit` that a life needs, for a host cache."""

    device = "cpu"
    put = get = staticmethod(np.asarray)


HOST = Host()


class Life:
    """A cache of a sealed and a plain layer, the outputs of its attention, and the bytes of its sealed blocks."""

    def __init__(self, kit: Kit | Host, spec: AttentionSpec = SPEC, **options) -> None:
        self.kit, self.spec = kit, spec
        sizes = {"block_size": BLOCK, "num_blocks": [14, 14, 9], "max_sequences": 4}
        self.cache = PagedKVCache([spec, FULL], **sizes | options, device=kit.device)
        self.outputs, self.sealed, self.num_steps = [], [], 0

    def numbers(self, total):
        """Return keys, values and queries that follow from the number of steps."""
        random = np.random.default_rng(self.num_steps)
        shapes = (total, 2, 32), (total, 2, 16), (total, 4, 32)
        return [self.kit.put(random.normal(size=shape).astype(np.float32)) for shape in shapes]

    def step(self, sequences, counts, accepted=None, stream=None, out=None):
        """Run a step without waiting for the device; return what must stay alive until it has finished."""
        self.num_steps += 1
        batch = self.cache.prepare(sequences, counts, out, stream=stream)
        numbers = self.numbers(sum(counts))
        for layer in range(2):
            self.cache.write(layer, *numbers[:2], batch, stream=stream)
            self.outputs.append(self.cache.attend(layer, numbers[2], batch, stream=stream))
        self.cache.commit(batch, accepted)
        return batch, numbers

    def note(self, *sequences):
        """Note the sealed blocks of sequences."""
        rows = [(self.cache._parts.tables.blocks(one.row, 0), one.num_sealed_tokens // BLOCK) for one in sequences]
        blocks = np.concatenate([row[:count] for row, count in rows])
        for plane in self.spec.planes:
            self.sealed.append(self.kit.get(self.cache.plane(plane.name, 0))[blocks])
        self.cache.check_invariants()


def assert_alike(on_device: Life, on_host: Life) -> None:
    """Assert that sealed bytes are equal, and outputs within the bound of bfloat16."""
    for found, of_host in zip(on_device.outputs, on_host.outputs, strict=True):
        expected = np.asarray(of_host, np.float64)
        error = np.linalg.norm(np.asarray(on_device.kit.get(found), np.float64) - expected)
        assert error <= 6e-3 * np.linalg.norm(expected)
    assert len(on_device.sealed) == len(on_host.sealed) > 0
    for found, expected in zip(on_device.sealed, on_host.sealed, strict=True):
        np.testing.assert_array_equal(found, expected)


FORMATS = cases([{"value_format": "kivi4"}], [{}, {"format": "kivi4"}, {"format": "kivi4", "value_format": "kivi2"}])


@pytest.mark.parametrize("options", FORMATS)
def test_a_cache_seals_and_shares_what_a_host_cache_does(cuda, options):
    """Steps with rejected tokens, a fork, truncation, prefix reuse, swaps and removals."""

    def life(kit):
        one = Life(kit, replace(SPEC, **options))
        cache, space = one.cache, SwapSpace(one.cache, num_blocks=[9, 9, 6])
        first, second = cache.add_sequence(range(100)), cache.add_sequence(range(200, 240))
        kept = [one.step([first, second], [57, 9]), one.step([first, second], [6, 30], [2, 30])]
        one.note(first, second)
        fork = cache.fork(first)
        kept.append(one.step([fork, second, first], [3, 1, 11]))
        cache.truncate(first, 50)
        kept.append(one.step([first, fork], [1, 4]))
        one.note(first, second, fork)
        cache.swap_out([fork, second], space)
        cache.remove(first)
        cache.clear_prefix_cache()
        kept.append(one.step([third := cache.add_sequence(range(300, 400))], [70]))
        cache.swap_in([second, fork])
        one.note(third, second, fork)
        kept.append(one.step([fork, second], [1, 1]))
        cache.remove(third)
        again = cache.add_sequence(range(300, 400))
        assert again.num_cached_tokens == again.num_sealed_tokens == 64
        kept.append(one.step([again], [7]))
        one.note(again)
        return one

    assert_alike(life(cuda), life(HOST))


def test_steps_on_any_stream_seal_in_the_order_of_their_passes(cuda):
    """Each step runs on another stream than the last; a step in flight on a third is committed between them."""

    def life(kit, streams):
        one = Life(kit, num_blocks=[20, 20, 20])
        first, second, late = (one.cache.add_sequence(range(n, n + 90)) for n in (0, 100, 200))
        kept = [one.step([late], [40], stream=streams[2])]
        one.num_steps += 1
        waiting, rows = one.cache.prepare([late], 9, stream=streams[2]), one.numbers(9)
        for i, counts in enumerate(([40, 3], [1, 50], [30, 1], [1, 16])):
            kept.append(one.step([first, second], counts, stream=streams[i % 2]))
            if i == 1:  # the pass of `waiting` is submitted after that of a step on another stream
                for layer in range(2):
                    one.cache.write(layer, *rows[:2], waiting, stream=streams[2])
                one.cache.commit(waiting)
        kept.append(one.step([late], [1], stream=streams[1]))
        for stream in streams:
            if stream is not None:
                kit.runtime.synchronize(stream)
        assert [each.num_sealed_tokens for each in (first, second, late)] == [48, 48, 16]
        one.note(first, second, late)
        return one

    assert_alike(life(cuda, [cuda.stream() for _ in range(3)]), life(HOST, [None] * 3))


def test_a_removal_seals_after_the_last_pass_and_before_later_steps(cuda):
    """Removed while its next step is in flight on another stream; the blocks of its tail are written at once."""

    def life(kit, streams):
        one = Life(kit, num_blocks=[20, 20, 5])
        first = one.cache.add_sequence(range(50))
        kept = [one.step([first], [35], stream=streams[0])]
        batch = one.cache.prepare([first], 1, stream=streams[1])
        one.cache.remove(first)
        one.cache.commit(batch)
        kept.append(one.step([one.cache.add_sequence(range(100, 200))], [60], stream=streams[1]))
        again = one.cache.add_sequence(range(50))
        assert again.num_sealed_tokens == 32
        for stream in streams:
            if stream is not None:
                kit.runtime.synchronize(stream)
        one.note(again)
        return one

    assert_alike(life(cuda, [cuda.stream(), cuda.stream()]), life(HOST, [None, None]))


def test_one_graph_serves_steps_whose_commits_seal_blocks(cuda):
    def life(kit):
        one = Life(kit, max_tokens_per_sequence=100)
        cache, sequences = one.cache, [one.cache.add_sequence(range(n, n + 100)) for n in (0, 200)]
        batch, shapes = cache.make_batch(2, 40), [(40, 2, 32), (40, 2, 16), (40, 4, 32), (40, 4, 16)]
        arrays, replay = [kit.put(np.zeros(shape, np.float32)) for shape in shapes], None

        def run(stream=None):
            for layer in range(2):
                cache.write(layer, *arrays[:2], batch, stream=stream)
            cache.attend(0, arrays[2], batch, out=arrays[3], stream=stream)

        for one.num_steps, counts in enumerate(([30, 10], [20, 1], [1, 25], [1, 1])):
            cache.prepare(sequences, counts, batch)
            if kit is HOST:
                arrays[:3] = one.numbers(40)
                run()
            else:
                for target, source in zip(arrays, map(kit.get, one.numbers(40)), strict=False):
                    kit.runtime.copy(target.pointer, source.ctypes.data, source.nbytes, 0)
                kit.runtime.synchronize(0)
                if one.num_steps == 0:
                    run()
                else:
                    replay = replay or kit.capture(run)
                    replay()
            one.outputs.append(kit.get(arrays[3])[: sum(counts)].copy())
            cache.commit(batch)
        assert [each.num_sealed_tokens for each in sequences] == [32, 16]
        one.note(*sequences)
        return one

    assert_alike(life(cuda), life(HOST))


@pytest.mark.parametrize("captured", ["the step", "the cache"])
def test_no_commit_seals_in_a_capture(cuda, captured):
    """Work that a commit submits would run at each replay, and not now."""
    one, other = Life(cuda), cuda.stream()
    sequence = one.cache.add_sequence(range(100))
    kept = one.step([one.cache.add_sequence(range(200, 240))], [40], stream=other)  # loads the kernels
    batches = []

    def attempt(stream):
        staged = one.cache._parts.staging
        if captured == "the step":
            batches[0]._step.staged._stream = stream  # as if it were the stream of the step
        else:
            staged.stream = stream
        with pytest.raises(DeviceError, match="being captured: a graph can use a step"):
            one.cache.commit(batches[0])
        assert (batches[0].in_flight, sequence.num_sealed_tokens) == (True, 0)
        batches[0]._step.staged._stream = staged.stream = other

    batches.append(one.cache.prepare([sequence], 60, stream=other))
    key, value, _ = one.numbers(60)
    for layer in range(2):
        one.cache.write(layer, key, value, batches[0], stream=other)
    cuda.capture(attempt)
    one.cache.commit(batches[0])
    assert sequence.num_sealed_tokens == 32
    cuda.runtime.synchronize(other)
    assert not kept[0].in_flight


def test_a_sequence_is_removed_while_a_graph_is_captured(cuda):
    """Its last blocks are not sealed then; those that were sealed before stay cached."""
    one = Life(cuda)
    sequence, stream = one.cache.add_sequence(range(100)), cuda.stream()
    kept = one.step([sequence], [70], stream=stream)
    assert sequence.num_sealed_tokens == 48

    def remove(captured):
        one.cache._parts.staging.stream = captured
        one.cache.remove(sequence)

    cuda.capture(remove)
    one.cache._parts.staging.stream = stream
    assert one.cache.match_length(range(100)) == 48
    one.cache.check_invariants()
    cuda.runtime.synchronize(stream)
    assert not kept[0].in_flight


def test_code_of_the_caller_that_removes_a_sequence_in_a_commit_changes_no_sealed_block(cuda, monkeypatch):
    """Such as a finalizer that the garbage collector runs."""

    def life(kit):
        one = Life(kit)
        first, second = one.cache.add_sequence(range(100)), one.cache.add_sequence(range(200, 300))
        kept = [one.step([first, second], [30, 40])]
        if kit is not HOST:
            staging = one.cache._parts.staging
            check, doomed = staging.refuse_captured, [second]

            def check_and_remove(stream):
                check(stream)
                if len(one.outputs) == 4 and doomed:  # in the second commit
                    one.cache.remove(doomed.pop())

            monkeypatch.setattr(staging, "refuse_captured", check_and_remove)
        kept.append(one.step([first], [40]))
        assert first.num_sealed_tokens == 48
        one.note(first)
        return one

    assert_alike(life(cuda), life(HOST))


def test_sealed_blocks_come_back_from_a_host_tier(cuda):
    """The copies of a backup follow the kernel that seals; those of a promotion precede the next step."""

    def life(kit):
        one = Life(kit)
        tier = HostTier(one.cache, num_blocks=12, huge_pages=False)
        assert kit is HOST or tier.pool.memory.wait_registered(60)
        first = one.cache.add_sequence(range(100))
        kept = [one.step([first], [75])]
        one.note(first)
        assert tier.backup(first) > 0
        assert tier.drain()
        tier.poll()
        one.cache.remove(first)
        one.cache.clear_prefix_cache()
        kept.append(one.step([one.cache.add_sequence(range(200, 300))], [60]))  # in the blocks of the first
        assert tier.promote(range(100)) == 48
        again = one.cache.add_sequence(range(100))
        kept.append(one.step([again], [5]))
        one.note(again)
        tier.close()
        return one

    on_device, on_host = life(cuda), life(HOST)
    assert_alike(on_device, on_host)
    for first, again in zip(on_device.sealed[: len(SPEC.planes)], on_device.sealed[len(SPEC.planes) :], strict=True):
        np.testing.assert_array_equal(again, first)


@pytest.mark.slow
@pytest.mark.parametrize("model", cases(["two groups", "a window", "states and a window"], MODELS))
def test_random_operations(cuda, model):
    class DeviceWalk(DeviceBytes, Walk):
        kit = cuda

        def make_cache(self, layers, **options):
            return DeviceCache(cuda, layers, **options)

        def poison(self):
            if not self.cache.scrub:
                super().poison()

    run_walk(DeviceWalk(model, 0, scrub=model == "a window"), *cases([80], [150]))


def test_a_warm_commit_that_seals_is_one_launch_a_layer(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    one = Life(cuda)
    sequence, batch = one.cache.add_sequence(range(100)), one.cache.make_batch(1, 40)
    one.step([sequence], [40], out=batch)
    one.cache.prepare([sequence], 16, batch)
    spent = requests_of(cuda, lambda: one.cache.commit(batch))
    assert spent == {"launches": 1}
