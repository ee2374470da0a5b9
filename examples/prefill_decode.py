"""Prefill in one process, decode in another: sequences are handed over, and every token is verified.

The prefill process is killed in the middle. The decode process then computes that prompt itself, starts another prefill
process and continues.

Run it: python examples/prefill_decode.py
"""

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from pagecore import PagedKVCache, Sequence
from pagecore.serving.demo.model import Model, ModelSizes
from pagecore.tiers import HandoverError, SocketTransport, export_sequence, import_sequence

REQUESTS, DECODED, KILLED_AT = 6, 24, 3
SIZES = ModelSizes()  # four layers, of which two have a window of 48 tokens


def new_cache() -> PagedKVCache:
    return PagedKVCache(SIZES.specs(), block_size=16, num_blocks=64)


def prompt_of(request: int) -> list[int]:
    random = np.random.default_rng(request)
    shared = np.arange(64) % SIZES.vocab_size
    return [*shared.tolist(), *random.integers(0, SIZES.vocab_size, 40 + 30 * request).tolist()]


def step(model: Model, cache: PagedKVCache, sequence: Sequence) -> int:
    """Compute the known tokens that are not computed yet; append the most likely next one and return it."""
    start, end = sequence.num_computed_tokens, sequence.num_tokens
    with cache.prepare([sequence], end - start) as batch:

        def attend(layer: int, query: Any, key: Any, value: Any) -> Any:
            cache.write(layer, key, value, batch)
            return np.asarray(cache.attend(layer, query, batch))

        hidden = model.forward(sequence.tokens[start:], np.arange(start, end), attend)
        cache.commit(batch)
    token = int(model.logits(hidden[-1:]).argmax())
    cache.append_tokens([sequence], [[token]])
    return token


def serve_prefill(pipe: Connection) -> None:
    """Compute prompts and answer with their manifests until None comes."""
    model, cache = Model(SIZES), new_cache()
    with SocketTransport("tcp://127.0.0.1:0") as transport:
        while (prompt := pipe.recv()) is not None:
            with cache.add_sequence(prompt) as sequence:  # leaves the cache at the end; the export keeps its rows
                step(model, cache, sequence)
                pipe.send(export_sequence(cache, sequence, transport=transport, model="demo").encode())
        transport.drain(5)


class Prefill:
    """A prefill process and the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve_prefill, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def manifest(self, prompt: list[int]) -> bytes:
        self.pipe.send(prompt)
        received: bytes = self.pipe.recv()
        return received


def expected_tokens(model: Model, request: int) -> list[int]:
    """Prefill and decode in this process."""
    cache = new_cache()
    sequence = cache.add_sequence(prompt_of(request))
    return [step(model, cache, sequence) for _ in range(DECODED)]


def main() -> None:
    model, cache, prefill = Model(SIZES), new_cache(), Prefill()
    verified = 0
    with SocketTransport() as transport:
        for request in range(REQUESTS):
            prompt = prompt_of(request)
            manifest = prefill.manifest(prompt)
            if request == KILLED_AT:
                prefill.process.kill()
                prefill.process.join()
            try:
                sequence = import_sequence(cache, manifest, transport=transport, deadline=10, model="demo")
                note = f"{sequence.num_computed_tokens - sequence.num_cached_tokens} of {len(prompt)} tokens arrived"
            except HandoverError as error:
                note = f"{type(error).__name__}: the prompt is computed here"
                sequence = cache.add_sequence(prompt)
                step(model, cache, sequence)
                prefill = Prefill()
            while sequence.num_tokens < len(prompt) + DECODED:
                step(model, cache, sequence)
            found = sequence.tokens[len(prompt) :].tolist()
            verified += found == expected_tokens(model, request)
            print(f"request {request}: {note}; decoded {found[:6]} ...")
            cache.remove(sequence)
            cache.check_invariants()
    prefill.pipe.send(None)
    prefill.process.join()
    print(f"all {DECODED} tokens of {verified} requests equal those of one process: {verified == REQUESTS}")


if __name__ == "__main__":
    main()
