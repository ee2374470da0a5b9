"""Recurrent states: copies and zeros of slots against numpy.copyto, decode steps against those without, state hits.

A copy that fits the caches is dominated by the checks of the call, about 10 us; only larger ones have a target.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.runner import Bench, Job
from bench.index.prepare import FULL, PreparedRows
from bench.serving.state_placement import best_state_hits, informed_state_hits
from bench.serving.synthetic_trace import write_shared_prompts
from pagecore.index import BlockPool, BlockTables, StateBuffers, StateTable, StepBuffers
from pagecore.serving.replay import replay
from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.replay.trace import read_trace
from pagecore.storage import StatePool, StateSpec
from pagecore.storage.state_shapes import delta_planes, mamba2_planes, short_conv_planes

COPY_TARGET = 0.9
# A step of a cache with states takes at most 1.5 times the time of one without.
STEP_TARGET = 0.67
SLOTS = 4
BLOCK = 16
MIB = 1 << 20
# Share of the tokens that the best placement saves; Qwen3-Next-80B in bfloat16.
HITS_TARGET = 0.95
HITS_GRID = 64  # the chunk of the model
HITS_MEMORY = "64GiB"
HITS_RUNNING = 128
QWEN_3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "max_position_embeddings": 262144,
}


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run copies and zeros of three models, and prepare + commit of decode rows."""
    models = {
        "Qwen3-Next, 12 layers": (StateSpec(delta_planes(16, 32, 128, 128)), 12),
        "Mamba-2 8192, 8 layers": (StateSpec(mamba2_planes(8192, 8, 128, 64, 128)), 8),
        "LFM2, 10 layers": (StateSpec(short_conv_planes(2048)), 10),
    }
    for name, (spec, layers) in models.items():
        _copies(bench, name, spec, bench.pick(layers, 1))
    for in_place in (True, False):
        _steps(bench, in_place)
        _steps_of_caches(bench, in_place)
    _hits(bench)


def _copies(bench: Bench, name: str, spec: StateSpec, layers: int) -> None:
    pool = StatePool(spec, 2 * SLOTS + 1, num_layers=layers)
    sources, targets = list(range(1, SLOTS + 1)), list(range(SLOTS + 1, 2 * SLOTS + 1))
    nbytes = SLOTS * pool.bytes_per_slot
    pool.zero(sources + targets)
    source, target = (np.ones(nbytes, np.uint8) for _ in range(2))
    last = pool.planes()[-1].numpy()

    def check() -> None:
        last[sources] = 3
        pool.copy(sources, targets)
        assert (last[targets] == 3).all()
        pool.zero(targets)
        assert not last[targets].any()

    sizes = {"layers": layers, "slots": SLOTS, "bytes_per_slot": pool.bytes_per_slot}
    bench.compare(
        f"copy {SLOTS} slots, {nbytes / MIB:.1f} MiB, {name}",
        partial(pool.copy, sources, targets),
        {"numpy.copyto": partial(np.copyto, target, source)},
        check=check,
        nbytes=nbytes,
        at_least={"numpy.copyto": COPY_TARGET} if nbytes > 8 * MIB else None,
        sizes=sizes,
    )
    bench.compare(
        f"zero {SLOTS} slots, {nbytes / MIB:.1f} MiB, {name}",
        partial(pool.zero, targets),
        {"numpy.copyto": partial(np.copyto, target, source)},
        check=check,
        nbytes=nbytes,
        sizes=sizes,
    )


def _hits(bench: Bench) -> None:
    """Compare the tokens that cached states save with those of the best placement, which knows the requests to come.

    The best placement keeps states anywhere in a prompt, in all slots, and serves requests in turn. A replay keeps one
    state a step, and its running requests hold slots and blocks. It has to find out where prompts part: the target is
    for the parts of prompts that `Scheduler` chooses. Without checkpoints before the end of a prompt, one state a
    request is the bound, placed by the rule of the cache and evicted with knowledge of the requests to come.
    """
    requests = bench.pick(2000, 30)
    with tempfile.TemporaryDirectory() as folder:
        for prompts in bench.pick((40, 300), (2, 3)):
            path = Path(folder) / "shared.jsonl"
            write_shared_prompts(path, requests, prompts, bench.pick(1.0, 0.25))
            _hits_of_trace(bench, f"{requests} requests, {prompts} shared prompts", path)


def _hits_of_trace(bench: Bench, name: str, path: Path) -> None:
    prompts = [request.prompt() for request in read_trace(path)]
    unlimited = ReplayOptions(model=QWEN_3_NEXT, blocks="unbounded", max_running=HITS_RUNNING)
    limited = ReplayOptions(model=QWEN_3_NEXT, memory=HITS_MEMORY, max_running=HITS_RUNNING)
    cases = {"unlimited slots": unlimited}
    cases |= {f"{HITS_MEMORY}, {evict}": replace(limited, evict=evict) for evict in ("lru", "slru")}
    cases[f"{HITS_MEMORY}, no prompt checkpoints"] = replace(limited, prompt_checkpoints=0)
    bench.fact(f"{name}: prompt tokens", sum(map(len, prompts)))
    for case, options in cases.items():
        states = replay(path, options).states
        assert states is not None
        best, informed = (
            sum(bound(prompts, HITS_GRID, states.num_states - 1)) for bound in (best_state_hits, informed_state_hits)
        )
        with bench.case(f"state hits, {name}, {case}"):
            assert 0 < states.hit_tokens <= states.matched_tokens, "states save more than the cached blocks have"
        bench.fact(f"{name}, {case}: slots", states.num_states - 1)
        bench.fact(f"{name}, {case}: tokens in cached blocks", states.matched_tokens)
        bench.fact(f"{name}, {case}: the best placement saves tokens", best)
        bench.fact(f"{name}, {case}: cached states save tokens", states.hit_tokens)
        bench.fact(f"{name}, {case}: share of the best, target {HITS_TARGET}", states.hit_tokens / max(best, 1))
        bench.fact(f"{name}, {case}: share of one state a request", states.hit_tokens / max(informed, 1))


class _Rows:
    """Rows of uneven lengths up to the context, with or without states."""

    def __init__(self, batch_size: int, context: int, with_states: bool, in_place: bool = True) -> None:
        columns = (context + 4096) // BLOCK
        self.tables = BlockTables(
            BlockPool(batch_size * columns + 1),
            block_sizes=BLOCK,
            max_sequences=batch_size,
            max_blocks_per_sequence=columns,
        )
        self.states = StateTable(self.tables, 3 * batch_size + 1, in_place=in_place) if with_states else None
        self.step = StepBuffers(batch_size, context)
        self.slots = StateBuffers(batch_size)
        self.rows = np.arange(batch_size, dtype=np.int32)
        self.counts = np.ones(batch_size, np.int32)
        for row in range(batch_size):
            if self.states is None:
                self.tables.prepare([self.tables.add()], context - row % 256, self.step)
            else:
                self.states.prepare([self.states.add()], context - row % 256, self.step, self.slots)
                self.states.commit([row])

    def prepare(self) -> None:
        if self.states is None:
            self.tables.prepare(self.rows, self.counts, self.step)
        else:
            self.states.prepare(self.rows, self.counts, self.step, self.slots)

    def commit(self) -> None:
        if self.states is not None:
            self.states.commit(self.rows)


def _steps(bench: Bench, in_place: bool) -> None:
    batch_size, context = bench.pick((256, 8192), (8, 512))
    ours, plain = (_Rows(batch_size, context, with_states, in_place) for with_states in (True, False))

    def check() -> None:
        ours.prepare()
        plain.prepare()
        np.testing.assert_array_equal(ours.step.seq_lens, plain.step.seq_lens)
        np.testing.assert_array_equal(ours.step.slot_mappings[0] % BLOCK, plain.step.slot_mappings[0] % BLOCK)
        assert len(set(ours.slots.state_write.tolist())) == batch_size
        ours.commit()

    kind = "in place" if in_place else "two slots"
    bench.compare(
        f"prepare {batch_size} decode rows with states, {kind}",
        Job(ours.prepare, after=ours.commit),
        {"block tables alone": Job(plain.prepare)},
        check=check,
        sizes={"rows": batch_size, "context": context, "block_size": BLOCK},
    )


def _steps_of_caches(bench: Bench, in_place: bool) -> None:
    batch_size, context, capacity = bench.pick((256, 8192, 131_072), (8, 256, 4096))
    spec = StateSpec(delta_planes(16, 32, 128, 128), in_place=in_place)
    ours = PreparedRows([FULL, spec], batch_size, context, capacity)
    plain = PreparedRows([FULL], batch_size, context, capacity)

    def check() -> None:
        ours.prepare()
        plain.prepare()
        np.testing.assert_array_equal(np.from_dlpack(ours.batch.seq_lens), np.from_dlpack(plain.batch.seq_lens))
        assert len(set(np.from_dlpack(ours.batch.state_write).tolist())) == batch_size
        ours.commit()
        plain.commit()

    bench.compare(
        f"prepare + plan, {batch_size} decode rows of a cache with states, {'in place' if in_place else 'two slots'}",
        Job(ours.prepare, after=ours.commit),
        {"cache without states": Job(plain.prepare, after=plain.commit)},
        check=check,
        at_least={"cache without states": STEP_TARGET},
        sizes={"rows": batch_size, "context": context, "row_capacity": capacity, "block_size": BLOCK},
    )
