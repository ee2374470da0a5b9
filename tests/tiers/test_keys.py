"""Content keys and fingerprints: equal to a plain-Python twin, and different where the stored bytes differ."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pagecore import AttentionSpec, LatentSpec, PagedKVCache, Plane, StateSpec, TensorParallel
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage import HostPool
from pagecore.storage.state_shapes import short_conv_planes
from pagecore.tiers.keys import Fingerprint, content_chain, lane_keys, namespace_digest, payload_sum, payload_sums
from tests.reference.content_keys import content_chain as twin_chain
from tests.reference.xxh3 import xxh3_128
from tests.together import together

ROOT = Path(__file__).parent.parent.parent
DATA = bytes((i * 7 + 3) & 255 for i in range(5000))
SECRET = bytes((i * 31 + 5) & 255 for i in range(192))
# Of xxhash 4.1.0: bytes hashed, XXH3_128 with SECRET, XXH3_64 with the seed 77.
VECTORS = [
    (17, "275e71b9ad6d69e531f7832b05464175", 15979302585778044850),
    (64, "16d40d3ae7e05cd51279d6af67272f61", 3784486766627541069),
    (128, "071b38934f391e8e5168ef41890a34da", 8777718069149793686),
    (129, "358d8aa41ccd1256a7593a988cdbc803", 17119947395144658773),
    (240, "50d47f46c93e6e6e72fdf68561156bfb", 12612466629803018891),
    (241, "259105835c8a7d83747f401c0111780b", 11783894824658814161),
    (1024, "55979fd92a3194255b0ead69e7bd82a0", 9284598213568814428),
    (5000, "b036652945a632d90fb30d8c58044fe0", 657591368728541919),
]


def fingerprint(block_size=16, **options):
    options = {"model": "m", "lanes": ("a",), "payload_bytes": (4096,)} | options
    return Fingerprint(block_size=block_size, **options)


def cache(layers=None, **options):
    return PagedKVCache(AttentionSpec(2, 64) if layers is None else layers, num_blocks=9, device="none", **options)


@pytest.mark.parametrize(("size", "wide", "_narrow"), VECTORS, ids=[str(row[0]) for row in VECTORS])
def test_the_twin_of_xxh3_agrees_with_the_reference_implementation(size, wide, _narrow):
    assert xxh3_128(DATA[:size], SECRET).hex() == wide


@together("hash", ["xxh3_128", "sha256"])
@together("block_size", [1, 2, 16, 33, 64, 512])
def test_chains_equal_the_twin(hash, block_size):
    rng = np.random.default_rng(block_size)
    made = fingerprint(block_size, hash=hash, salt=b"salt")
    for blocks, extra in [(0, 0), (1, 0), (3, block_size - 1)]:
        tokens = rng.integers(-(2**31), 2**31, blocks * block_size + extra)
        for namespace in (None, "tenant", ("a", 1)):
            got = content_chain(made, tokens, namespace=namespace)
            assert got.dtype == np.uint8
            assert got.shape == (blocks, 16)
            space = namespace_digest(namespace)
            expected = twin_chain(made.digest, tokens.tolist(), block_size, space=space, hash=hash)
            assert [bytes(row) for row in got] == expected


@pytest.mark.parametrize("hash", ["xxh3_128", "sha256"])
def test_spans_enter_the_blocks_that_they_reach(hash):
    made = fingerprint(4, hash=hash)
    tokens = list(range(20))
    spans = [(9, 11, -5), (2, 5, b"image"), (11, 30, b"x" * 32)]
    got = [bytes(row) for row in content_chain(made, tokens, spans=spans)]
    assert got == twin_chain(made.digest, tokens, 4, spans=spans, hash=hash)
    plain = [bytes(row) for row in content_chain(made, tokens)]
    assert all(a != b for a, b in zip(got, plain, strict=True))
    late = [bytes(row) for row in content_chain(made, tokens, spans=spans[:1])]
    assert [a == b for a, b in zip(late, plain, strict=True)] == [True, True, False, False, False]


def test_states_are_named_by_a_bool():
    for value in (True, False):
        made, given = fingerprint(has_states=value), fingerprint(has_states=np.bool_(value))
        assert (given, given.digest) == (made, made.digest)
    for value in (1, 0, "yes", None):
        with pytest.raises(UnsupportedOption, match="has_states"):
            fingerprint(has_states=value)


def test_every_part_of_the_prompt_changes_the_keys():
    base = {"tokens": list(range(8)), "namespace": "n", "spans": [(1, 3, b"d")]}
    others = [
        {"tokens": [1, *range(1, 8)]},
        {"namespace": None},
        {"namespace": b"n"},
        {"namespace": ("n",)},
        {"namespace": ""},
        {"spans": None},
        {"spans": [(1, 3, b"e")]},
        {"spans": [(1, 4, b"d")]},
        {"spans": [(0, 3, b"d")]},
        {"spans": [(1, 3, int.from_bytes(b"d", "little"))]},
        {"spans": [(1, 2, b"d"), (2, 3, b"d")]},
    ]
    made = fingerprint(4)
    chains = []
    for change in ({}, *others):
        given = base | change
        chain = content_chain(made, given["tokens"], namespace=given["namespace"], spans=given["spans"])
        chains.append([bytes(row) for row in chain])
    for block in range(2):  # a block's hash covers everything before the block
        assert len({chain[block] for chain in chains}) == len(chains)
    # The chain of a prefix is the prefix of the chain.
    longer = content_chain(made, [*base["tokens"], 9, 9, 9, 9], namespace="n", spans=base["spans"])
    assert [bytes(row) for row in longer[:2]] == chains[0]


def test_namespaces_differ_by_value_and_type():
    values = [None, "", "a", b"a", 0, 1, -1, 255, 256, 1.0, True, False, (), ("a",), (("a",),), ("a", None), ("", "a")]
    digests = [namespace_digest(value) for value in values]
    assert len(set(digests)) == len(values)
    assert digests[0] == b""
    assert namespace_digest(-0.0) == namespace_digest(0.0)


@pytest.mark.parametrize("namespace", [object(), frozenset({1}), float("nan"), np.int64(3), ("a", [1])])
def test_a_namespace_without_a_value_outside_the_process_is_refused(namespace):
    with pytest.raises(UnsupportedDtype, match="use str, bytes, int"):
        content_chain(fingerprint(), range(16), namespace=namespace)
    nested = ()
    for _ in range(20):
        nested = (nested,)
    with pytest.raises(UnsupportedDtype, match="16 levels"):
        namespace_digest(nested)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([[1, 2]], ShapeError),
        (3, ShapeError),
        ([2**31] * 16, ShapeError),
        ([0.5] * 16, UnsupportedDtype),
        (["a"] * 16, UnsupportedDtype),
    ],
)
def test_invalid_tokens_are_refused(tokens, error):
    with pytest.raises(error):
        content_chain(fingerprint(), tokens)


def test_a_chain_takes_strided_and_wide_tokens():
    tokens = np.arange(64, dtype=np.int64)
    expected = content_chain(fingerprint(), tokens.tolist())
    for given in (
        tokens,
        tokens.astype(np.int32),
        np.repeat(tokens, 2)[::2].astype(np.int32),
        tokens.astype(np.uint16),
    ):
        np.testing.assert_array_equal(content_chain(fingerprint(), given), expected)


def test_keys_of_lanes_end_with_the_lane():
    chain = content_chain(fingerprint(), range(48))
    keys = lane_keys(chain, 3)
    np.testing.assert_array_equal(keys[:, :16], chain)
    assert (keys[:, 16] == 3).all()
    for lane in (-1, 255, "x"):
        with pytest.raises(ShapeError):
            lane_keys(chain, lane)
    with pytest.raises(ShapeError):
        lane_keys(keys, 0)


@pytest.mark.parametrize("size", [0, 1, 16, 17, 240, 241, 4095, 5000])
def test_sums_of_payloads_are_seeded_by_the_key(size):
    memory = np.frombuffer(DATA, np.uint8).copy()
    keys = np.random.default_rng(0).integers(0, 256, (3, 17), np.uint8)
    pieces = np.array([[memory.ctypes.data, size]] * 3, np.uint64)
    sums = payload_sums(keys, pieces)
    assert len({int(each) for each in sums}) == 3
    assert [payload_sum(key, memory.ctypes.data, size) for key in keys] == sums.tolist()
    if size:
        memory[size - 1] ^= 1
        assert (payload_sums(keys, pieces) != sums).all()
    with pytest.raises(ShapeError):
        payload_sums(keys[:, :16].copy(), pieces)
    with pytest.raises(ShapeError):
        payload_sums(keys, pieces[:2])


def test_sums_agree_with_the_reference_implementation():
    """XXH3_64 of a payload of 17 bytes and more; the seed is XXH3_64 of the key."""
    memory = np.frombuffer(DATA, np.uint8).copy()
    key = DATA[:17]  # its XXH3_64 by xxhash 4.1.0 is 8163341949877205007
    got = [payload_sum(key, memory.ctypes.data, size) for size in (240, 5000)]
    assert got == [5886150337481883667, 1278286443533996555]


def test_fingerprints_differ_wherever_the_stored_bytes_differ():
    spec = AttentionSpec(2, 64)
    of = partial(Fingerprint.of, model="m")
    states = StateSpec(short_conv_planes(64))
    made = [
        of(cache()),
        Fingerprint.of(cache(), model="other"),
        of(cache(), revision="r"),
        of(cache(), salt=b"s"),
        of(cache(), hash="sha256"),
        of(cache(block_size=32)),
        of(cache(num_layers=2)),
        of(cache([spec, AttentionSpec(2, 64, window=32)])),
        of(cache([spec, AttentionSpec(2, 64, window=64)])),
        of(cache(AttentionSpec(2, 64, dtype="float16"))),
        of(cache(AttentionSpec(2, 64, format="int8_token"))),
        of(cache(AttentionSpec(2, 64, format="float8_e4m3fn"))),
        of(cache(AttentionSpec(2, 64, format="float8_e4m3fn", key_scale=2.0))),
        of(cache(AttentionSpec(2, 64, format="int8_token", value_format="int4_token"))),
        of(cache(AttentionSpec(2, 64, key_rotation="hadamard"))),
        of(cache(AttentionSpec(2, 64, value_rotation="hadamard"))),
        of(cache([spec, AttentionSpec(2, 64, key_rotation="hadamard")])),
        of(cache([AttentionSpec(2, 64, key_rotation="hadamard"), spec])),
        of(cache(AttentionSpec(4, 32))),
        of(cache([spec, states])),
        of(cache(AttentionSpec(4, 64), parallel=TensorParallel(0, 2))),
        of(cache(AttentionSpec(4, 64), parallel=TensorParallel(1, 2))),
        of(PagedKVCache(spec, num_blocks=9, device="cpu", layout="BNHD")),
    ]
    assert len({each.digest for each in made}) == len(made)
    assert len({each.name for each in made}) == len(made)
    assert of(cache()) == of(cache(max_sequences=3))
    assert of(cache()).digest == of(PagedKVCache(spec, num_blocks=17, device="cpu")).digest
    windows = made[7]
    assert windows.num_lanes == 2
    assert windows.payload_bytes == (16 * 2 * 2 * 64 * 2,) * 2
    assert made[19].has_states
    assert made[19].payload_bytes[1] == states.nbytes


@dataclasses.dataclass(frozen=True)
class HeadsSpec:
    """A spec of one's own, whose heads are split; it does not name their number."""

    heads: int
    window = None

    @property
    def planes(self):
        return (Plane("code", (self.heads, 8), "float32"),)

    def shard(self, parallel):
        return HeadsSpec(len(parallel.heads(self.heads)))


def test_ranks_that_hold_the_same_heads_may_share_entries():
    def made(spec, rank, size, replicas=1):
        ranks = PagedKVCache(spec, num_blocks=9, device="none", parallel=TensorParallel(rank, size))
        return Fingerprint.of(ranks, model="m", replicas=replicas)

    latent = LatentSpec(16, 8, num_query_heads=16, scale=1.0)
    whole = made(latent, 0, 1)
    assert {made(latent, rank, 4, 4) for rank in range(4)} == {made(latent, 1, 2, 2), whole}
    assert len({made(latent, rank, 4) for rank in range(4)} | {whole}) == 5
    grouped = AttentionSpec(4, 8, num_query_heads=16)
    assert [made(grouped, rank, 8, 2) for rank in range(8)] == [made(grouped, rank // 2, 4) for rank in range(8)]
    states = [latent, StateSpec(short_conv_planes(64, ranks=4), ranks=4)]
    for spec, size, replicas, error, says in [
        (grouped, 8, 3, ShapeError, "does not divide the 8 ranks"),
        (grouped, 8, 0, ShapeError, "replicas is 0"),
        (grouped, 2, 2, UnsupportedOption, "hold the same heads of layer 0 is 1"),
        (AttentionSpec(8, 8, num_query_heads=16), 8, 2, UnsupportedOption, "hold the same heads of layer 0 is 1"),
        ([AttentionSpec(2, 8), AttentionSpec(4, 8)], 8, 4, UnsupportedOption, "hold the same heads of layer 1 is 2"),
        (HeadsSpec(8), 8, 2, UnsupportedOption, "hold the same heads of layer 0 is 1"),
    ]:
        with pytest.raises(error, match=says):
            made(spec, 0, size, replicas)
    hybrid = PagedKVCache(states, num_blocks=9, num_states=9, device="none", parallel=TensorParallel(0, 4))
    with pytest.raises(UnsupportedOption, match="states are split over the ranks"):
        Fingerprint.of(hybrid, model="m", replicas=4)


def test_integers_of_numpy_make_the_same_fingerprint():
    numbers = {"block_size": 16, "payload_bytes": (4096,), "rank": 1, "num_ranks": 2, "first_layer": 3}
    of_numpy = {name: (np.int64(4096),) if name == "payload_bytes" else np.int64(n) for name, n in numbers.items()}
    assert fingerprint(**of_numpy) == fingerprint(**numbers)
    assert fingerprint(**of_numpy).digest == fingerprint(**numbers).digest


def test_pipeline_stages_of_equal_layers_have_other_fingerprints():
    stages = [Fingerprint.of(cache(), model="m", first_layer=first) for first in (0, 4, 8)]
    assert stages[0] == Fingerprint.of(cache(), model="m")
    assert len({stage.digest for stage in stages}) == 3
    assert len({content_chain(stage, range(64)).tobytes() for stage in stages}) == 3
    with pytest.raises(ShapeError, match="first_layer is -1"):
        Fingerprint.of(cache(), model="m", first_layer=-1)


def test_payloads_are_those_of_host_pools():
    """Planes of a state are aligned to their items, so that a payload can be larger than the sum of its planes."""
    planes = (Plane("a", (3,), "bfloat16", per="sequence"), Plane("b", (5,), "float32", per="sequence"))
    layers = [AttentionSpec(2, 64), AttentionSpec(1, 32, window=32), StateSpec(planes)]
    made = Fingerprint.of(cache(layers), model="m")
    groups = [(layers[0], 1), (layers[1], 1)]
    pool = HostPool(groups, 16, [layers[2]], num_blocks=[2, 2], num_states=2)
    assert made.payload_bytes == tuple(pool.payload_bytes)
    pool.close()
    assert made.payload_bytes[2] == 28


@pytest.mark.slow
def test_fingerprints_are_equal_in_another_process():
    code = (
        "from tests.tiers.test_keys import *\n"
        "made = Fingerprint.of(cache(), model='m', salt=b's')\n"
        "print(made.digest.hex(), content_chain(made, range(64), namespace=('t', 1)).tobytes().hex())"
    )
    run = [sys.executable, "-c", code]
    ran = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    made = Fingerprint.of(cache(), model="m", salt=b"s")
    chain = content_chain(made, range(64), namespace=("t", 1))
    assert ran.stdout.split() == [made.digest.hex(), chain.tobytes().hex()]
    assert "salt" not in repr(made)


@together(
    ("change", "error"),
    [
        ({"model": ""}, UnsupportedOption),
        ({"model": None}, UnsupportedOption),
        ({"revision": 3}, UnsupportedOption),
        ({"salt": "text"}, UnsupportedOption),
        ({"hash": "md5"}, UnsupportedOption),
        ({"block_size": 0}, ShapeError),
        ({"rank": 2, "num_ranks": 2}, ShapeError),
        ({"rank": -1}, ShapeError),
        ({"num_ranks": 0}, ShapeError),
        ({"lanes": ()}, ShapeError),
        ({"payload_bytes": (1, 2)}, ShapeError),
        ({"payload_bytes": (0,)}, ShapeError),
        ({"lanes": ("a",) * 256, "payload_bytes": (1,) * 256}, ShapeError),
    ],
)
def test_invalid_fingerprints_are_refused(change, error):
    with pytest.raises(error):
        dataclasses.replace(fingerprint(), **change)
    with pytest.raises(UnsupportedOption):
        Fingerprint.of(object(), model="m")
