"""A soak of the tiers: engines share stores while faults are drawn at random; every reused byte is compared.

    .venv/bin/python -m bench.soak --minutes 10 [--seed N]

Two engines have a group with a window, a third has states too. The engines have host memory, a store in memory that
fails on purpose, a disk store each, and a Redis server if redis-server is installed. They hand sequences over to each
other. The exit code is 1 if a byte was wrong, a block, thread or descriptor was left, or a request did not end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.soaking.engine import ATTENTION, BLOCK, HYBRID, Engine, StoreMaker, Tokens, Totals
from bench.soaking.faults import FAULTS, FaultyStore, RedisServer, rot_file
from bench.soaking.handover import hand_over
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.guard import Breaker, Deadline, Guard
from pagecore.tiers.handover.transports.sockets import SocketTransport
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.remote.resp import RespStore
from pagecore.tiers.store import BlockStore

# The guards of the soak are impatient, so that many batches are given up.
DEADLINE = Deadline(0.03, 200e6)
LONGEST = 30 * BLOCK
MODELS = (ATTENTION, ATTENTION, HYBRID)
DISK_BYTES = 1 << 20


class Soak:
    """One run.

    Parameters
    ----------
    seed : int
    folder : Path
        Empty; the disk stores are there.
    redis : RedisServer or None
    """

    def __init__(self, seed: int, folder: Path, redis: RedisServer | None) -> None:
        self.draw = random.Random(seed)
        self.folder = folder
        self.redis = redis
        self.totals = Totals()
        self.faults: Counter[str] = Counter()
        self.data: dict[bytes, bytes] = {}
        self.memory_stores: dict[int, FaultyStore] = {}
        self.prompts: list[tuple[Tokens, Hashable]] = []
        self.transport = SocketTransport(f"unix://{folder}/handover.sock")
        self.engines = [self.open(number) for number in range(len(MODELS))]

    def open(self, number: int) -> Engine:
        """Open an engine with its stores, the nearest first."""
        makers: list[StoreMaker] = [lambda fingerprint: self._disk(number, fingerprint)]
        if self.redis is not None:
            makers.append(self._redis)
        makers.append(lambda _: self._memory(number))
        return Engine(makers, self.totals, MODELS[number])

    def run(self, seconds: float) -> None:
        """Ask, serve and plant faults for some time, then serve what is open."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn()
        if self.redis is not None:
            self.redis.tick()
        for engine in self.engines:
            if not engine.drain(30.0):
                raise RuntimeError(f"{len(engine.requests)} requests did not end: {engine.requests[:3]}")

    def turn(self) -> None:
        """One turn of one engine."""
        draw = self.draw
        number = draw.randrange(len(MODELS))
        engine = self.engines[number]
        for _ in range(draw.choice((0, 1, 1, 3))):
            tokens, namespace = self.prompt()
            engine.ask(tokens, namespace, draw.choice((None, None, 0.0, 0.002, 0.05)))
        if draw.random() < 0.1:
            self.plant(number)
            engine = self.engines[number]  # it may be a new one
        if draw.random() < 0.05:
            receiver = self.engines[{0: 1, 1: 0}.get(number, number)]
            tokens, namespace = self.prompt()
            self.faults[hand_over(self.transport, engine, receiver, tokens, namespace, draw)] += 1
        if draw.random() < 0.05 and engine.requests:
            self.faults["cancel"] += 1
            draw.choice(engine.requests)[0].cancel()
        engine.step()
        if draw.random() < 0.05:
            engine.tiers.check_invariants()
        if len(engine.requests) > 8:
            engine.tiers.wait(engine.requests[0][0], 0.1)
        if self.redis is not None:
            self.redis.tick(time.monotonic())

    def prompt(self) -> tuple[Tokens, Hashable]:
        """Return a new prompt, one that was asked before, or one that goes on from it."""
        draw = self.draw
        tokens: Tokens = np.empty(0, np.int32)
        namespace: Hashable = draw.choice((None, None, "tenant"))
        if self.prompts and draw.random() < 0.85:
            tokens, namespace = draw.choice(self.prompts[-60:])
        if draw.random() < 0.4 or len(tokens) < 2:
            more = np.array([draw.randrange(1 << 20) for _ in range(draw.randrange(2, 8 * BLOCK))], np.int32)
            tokens = np.concatenate([tokens, more])[:LONGEST]
            self.prompts.append((tokens, namespace))
        return tokens, namespace

    def plant(self, number: int) -> None:
        """Plant one fault."""
        draw, engine = self.draw, self.engines[number]
        kinds = ["memory", "memory", "late", "rot disk", "rot memory", "pin", "clear", "reopen"]
        if self.redis is not None:
            kinds += ["stop redis", "restart redis"]
        kind = draw.choice(kinds)
        if kind in ("reopen", "restart redis") and draw.random() < 0.8:
            return
        store = self.memory_stores[number]
        if kind == "memory":
            kind = draw.choice(FAULTS)
            store.faults += [kind] * draw.choice((1, 1, 4))
        elif kind == "late":
            store.write_late()
        elif kind == "rot disk":
            rot_file(self.folder / str(number), draw)
        elif kind == "rot memory" and self.data:
            key = draw.choice(sorted(self.data))
            payload = bytearray(self.data[key])
            payload[draw.randrange(len(payload))] ^= 1 << draw.randrange(8)
            self.data[key] = bytes(payload)
        elif kind == "pin":
            self.serve_while_pinned(engine)
        elif kind == "clear":
            engine.cache.clear_prefix_cache()
            engine.host.clear()
        elif kind == "reopen":
            if self.redis is not None:
                self.redis.tick()
            engine.drain(10.0)
            engine.close()
            self.engines[number] = self.open(number)
        elif kind == "stop redis" and self.redis is not None:
            self.redis.stop_for(draw.uniform(0.01, 0.3))
        elif kind == "restart redis" and self.redis is not None:
            self.redis.restart()
        self.faults[kind] += 1

    def serve_while_pinned(self, engine: Engine) -> None:
        """Serve a few requests while the host is full of pinned prefixes."""
        with ExitStack() as pins:
            for tokens, namespace in self.prompts[-20:]:
                pins.enter_context(engine.host.hold(tokens, namespace=namespace))
            for _ in range(3):
                engine.ask(*self.prompt(), 0.05)
            engine.step()

    def close(self) -> None:
        """Close the engines and their stores."""
        self.transport.close()
        for engine in self.engines:
            engine.close()

    def _disk(self, number: int, fingerprint: Fingerprint) -> BlockStore:
        folder = self.folder / str(number)
        return self._guard(DiskStore(folder, fingerprint=fingerprint, max_bytes=DISK_BYTES, threads=2))

    def _redis(self, fingerprint: Fingerprint) -> BlockStore:
        assert self.redis is not None
        return self._guard(RespStore(self.redis.url, fingerprint=fingerprint, connections=1, timeout=5.0))

    def _memory(self, number: int) -> BlockStore:
        def make() -> BlockStore:
            self.memory_stores[number] = FaultyStore(self.data, f"memory {number}")
            return self.memory_stores[number]

        return Guard(make(), deadline=DEADLINE, breaker=_breaker(), budget_bytes=4 << 20, reopen=make)

    def _guard(self, store: BlockStore) -> BlockStore:
        return Guard(store, deadline=DEADLINE, breaker=_breaker())


def _breaker() -> Breaker:
    return Breaker(failures=3, first_pause=0.02, longest_pause=0.2)


def soak(seconds: float, seed: int, use_redis: bool = True) -> dict[str, Any]:
    """Run a soak; return its counts.

    Returns
    -------
    dict
        The fields of `Totals`; faults by kind; `leaked_threads` and `leaked_descriptors`.
    """
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory(prefix="pagecore-soak-") as folder:
        redis = RedisServer(Path(folder)) if use_redis and RedisServer.is_installed() else None
        try:
            run = Soak(seed, Path(folder), redis)
            try:
                run.run(seconds)
            finally:
                run.close()
        finally:
            if redis is not None:
                redis.kill()
    gc.collect()
    return {
        "seconds": seconds,
        "seed": seed,
        "redis": redis is not None,
        **asdict(run.totals),
        "faults": dict(sorted(run.faults.items())),
        "leaked_threads": len(set(threading.enumerate()) - threads),
        "leaked_descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=10.0, help="length of the run (10)")
    length.add_argument("--seconds", type=float, help="length of the run, instead of minutes")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts and faults (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the counts to FILE")
    options = parser.parse_args(arguments)
    seconds = options.minutes * 60 if options.seconds is None else options.seconds
    counts = soak(seconds, options.seed)
    for name, value in counts.items():
        shown = ", ".join(f"{key} {count:,}" for key, count in value.items()) if isinstance(value, dict) else value
        is_count = isinstance(shown, int) and not isinstance(shown, bool)
        print(f"{name:<20} {shown:,}" if is_count else f"{name:<20} {shown}")
    if options.json is not None:
        options.json.write_text(json.dumps(counts, indent=2) + "\n")
    is_right = not (counts["wrong_bytes"] or counts["leaked_threads"] or counts["leaked_descriptors"])
    print("nothing wrong was served and nothing leaked" if is_right else "FAILED")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
