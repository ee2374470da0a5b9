"""Formats of traces, compressed or not, and messages about malformed lines."""

import gzip
import json

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index import chain_hashes
from pagecore.serving.replay.trace import TraceError, TraceUnits
from pagecore.serving.whatif import WhatIfOptions, read_requests, what_if
from pagecore.tiers.events.wire import Batch
from tests.capabilities import require
from tests.serving.whatif.traffic import mooncake


def written(tmp_path, *lines, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def one(path, block_size=4, **options):
    (chunk,) = read_requests(path, block_size, **options)
    return chunk


def test_token_ids_share_prefixes_within_a_namespace(tmp_path):
    tokens = list(range(10))
    path = written(
        tmp_path,
        {"token_ids": tokens, "timestamp": 500},
        "",
        {"prompt_token_ids": tokens[:8], "timestamp": 1500},
        {"tokens": [*tokens[:4], 99, *tokens[5:]], "timestamp": 1500},
        {"token_ids": tokens, "timestamp": 2000, "namespace": "tenant"},
    )
    chunk = one(path)
    assert chunk.blocks.tolist() == [0, 1, 0, 1, 0, 2, 3, 4]
    assert chunk.starts.tolist() == [0, 2, 4, 6, 8]
    assert chunk.reusable.tolist() == [2, 1, 2, 2]
    assert chunk.tokens.tolist() == [10, 8, 10, 10]
    assert chunk.seconds.tolist() == [0.5, 1.5, 1.5, 2.0]
    assert one(path, limit=2).tokens.tolist() == [10, 8]


def test_mooncake_blocks_are_those_of_its_prompts(tmp_path):
    path = mooncake(tmp_path / "trace.jsonl", 1, requests=30)
    chunk = one(path, 96)
    seen = {}
    for i, line in enumerate(path.read_text().splitlines()):
        fields = json.loads(line)
        prompt = np.concatenate([np.arange(512) + 512 * each for each in fields["hash_ids"]])[: fields["input_length"]]
        hashes = chain_hashes(prompt, 96).tolist()
        numbers = [seen.setdefault(each, len(seen)) for each in hashes]
        assert chunk.blocks[chunk.starts[i] : chunk.starts[i + 1]].tolist() == numbers


def test_hash_ids_of_other_sizes_and_seconds(tmp_path):
    path = written(
        tmp_path,
        {"timestamp": 0.5, "input_length": 40, "output_length": 2, "hash_ids": [5, 6, 7]},
        {"timestamp": 2, "input_length": 33, "output_length": 2, "hash_ids": [5, 6, 8]},
        {"timestamp": 2, "input_length": 150, "output_length": 2, "hash_ids": [*range(20, 30)]},
    )
    chunk = one(path, 8, units=TraceUnits(16, "s"))
    assert chunk.blocks.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, *range(5, 23)]
    assert chunk.seconds.tolist() == [0.5, 2, 2]
    options = WhatIfOptions(memory="128..256", points=2, bytes_per_token=1, block_sizes=(8,), hash_block=16)
    assert what_if(path, options).curves[0].hit_tokens == [32, 32]
    with pytest.raises(TraceError, match=r"line 1: hash_ids has 3 ids; .* pass hash_block"):
        one(path, 8)
    tokens = written(tmp_path, {"timestamp": 3, "token_ids": [1, 2]})
    assert one(tokens, units=TraceUnits(time_unit="s")).seconds.tolist() == [3]
    with pytest.raises(UnsupportedOption, match="units is 16"):
        one(path, units=16)


def test_a_damaged_file_is_named(tmp_path):
    """zlib has an error of its own, which is not an OSError."""
    packed = bytearray(gzip.compress(b"{}"))
    packed[10] ^= 0xFF
    (tmp_path / "trace.gz").write_bytes(packed)
    with pytest.raises(TraceError, match=r"trace\.gz cannot be read"):
        one(tmp_path / "trace.gz")


def test_compressed_traces_are_read(tmp_path):
    path = mooncake(tmp_path / "trace.jsonl", 2)
    plain = one(path, 512)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert (one(packed, 512).blocks == plain.blocks).all()
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz cannot be read"):
        one(packed, 512)


def test_traces_in_zstandard_are_read(tmp_path):
    zstandard = require("zstandard")
    path = mooncake(tmp_path / "trace.jsonl", 2)
    packed = tmp_path / "trace.jsonl.zst"
    packed.write_bytes(zstandard.compress(path.read_bytes()))
    assert (one(packed, 512).blocks == one(path, 512).blocks).all()
    packed.write_bytes(b"not compressed")
    with pytest.raises(TraceError, match=r"trace\.jsonl\.zst cannot be read"):
        one(packed, 512)


def test_events_of_a_cache_give_its_requests(tmp_path):
    """A small cache evicts what a larger one would have kept: the curve of its events says so."""
    from pagecore.tiers.events.sources import sources_of

    cache = PagedKVCache(AttentionSpec(1, 8), block_size=4, num_blocks=9, device="none")
    (source,) = sources_of(cache._parts, None, "GPU")
    source.tree.start_journal()
    prompts = [list(range(16)), [*range(16), 5, 6, 7, 8], list(range(100, 132)), list(range(16))]
    lines = []
    for number, prompt in enumerate(prompts):
        sequence = cache.add_sequence(prompt)
        cache.commit(cache.prepare([sequence], len(prompt) - sequence.num_cached_tokens))
        cache.remove(sequence)
        batch = Batch(1000.0 + number, source.events_of(source.tree.take_changes().to_list()), 0)
        lines.append([batch.timestamp, batch.events, batch.rank])
    path = written(tmp_path, *lines)
    chunk = one(path)
    # Stored: 4 blocks; one block after 4 that were found; 8 blocks; the first 4 again, which had been evicted.
    assert [chunk.blocks[a:b].tolist() for a, b in zip(chunk.starts, chunk.starts[1:], strict=False)] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9, 10, 11, 12],
        [0, 1, 2, 3],
    ]
    assert chunk.first.tolist() == [0, 4, 0, 0]
    options = WhatIfOptions(memory="40..60", points=2, bytes_per_token=1, block_sizes=(4,))
    assert what_if(path, options).curves[0].hit_tokens == [0, 16]
    old = [1000.0, [["BlockStored", ["a", "b"], None, list(range(8)), 4, None], ["AllBlocksCleared"]]]
    assert one(written(tmp_path, old)).blocks.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: not JSON"),
        (["5"], "line 1: unknown format: got 5"),
        ([{"query": "hello"}], "line 1: unknown format: got .*query.*expected an object with hash_ids"),
        ([{"prompt": "hello"}], "line 1: field 'prompt' is text, of which equal prefixes depend on the tokenizer"),
        ([{"token_ids": [1]}, {"hash_ids": [1]}], "line 2: field 'token_ids' is missing"),
        ([{"token_ids": [1]}, [1]], "line 2: expected a JSON object"),
        ([{"token_ids": []}], "line 1: token_ids is .*not empty"),
        ([{"token_ids": [1, "a"]}], "expected a list of integers"),
        ([{"token_ids": [-1]}], "outside 0 to"),
        ([{"token_ids": [1], "timestamp": -1}], "timestamp is -1"),
        ([{"token_ids": [1], "timestamp": 9}, {"token_ids": [1], "timestamp": 8}], "line 2: time 0.008 s is earlier"),
        ([{"token_ids": [1], "namespace": 7}], "namespace is 7"),
        ([{"hash_ids": [1], "timestamp": 0}], "line 1: field 'input_length' is missing"),
        ([[1.0, [["BlockMoved"]]]], "line 1: expected an event"),
        ([[1.0, [["BlockStored", [1], None, [1], 16, None]]]], "line 1: the block_size of an event is 16, but 4 is"),
        ([[float("nan"), [["BlockStored", [1], None, [1], 4, None]]]], "line 1: timestamp is nan; expected a finite"),
        ([[-5.0, []]], "line 1: timestamp is -5.0; expected a number of seconds, 0 or more"),
        ([[1.0, [["BlockStored", [1.5], None, [1], 4, None]]]], "a block hash is 1.5"),
        ([], "contains no request"),
        ([[1.0, [["BlockStored", [1], None, [1], 4, None, "CPU"]]]], "or BlockStored events of medium 'GPU'"),
    ],
)
def test_malformed_lines_are_named_with_their_reason(tmp_path, lines, message):
    with pytest.raises(TraceError, match=message):
        list(read_requests(written(tmp_path, *lines), 4))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(TraceError, match=r"missing\.jsonl cannot be read: No such file"):
        list(read_requests(tmp_path / "missing.jsonl"))
    with pytest.raises(TraceError, match="Is a directory"):
        list(read_requests(tmp_path))
    with pytest.raises(ShapeError, match="block_size is 0"):
        list(read_requests(tmp_path, 0))
