"""vLLM 0.33's BlockPool and KVCacheManager, against BlockPool and the cache's prepare and commit.

Prefix caching is off on both sides, so neither hashes blocks.
"""

from __future__ import annotations

import argparse
import os
import tracemalloc
from functools import cache
from typing import Any

import numpy as np

from bench.harness.runner import Bench, Job
from bench.harness.targets import POOL_NS_MAX
from bench.index.prepare import FULL, PreparedRows
from bench.peers import add_to_path, unimportable
from pagecore.index import BlockPool

VERSION, FOLDER = "0.33.0", "vllm-0.33.0"
NAME = f"vLLM {VERSION}"
RECIPE = f"""  mkdir -p $PAGECORE_PEERS && cd $PAGECORE_PEERS
  pip install -U setuptools setuptools_scm setuptools_rust wheel torch
  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE={VERSION} pip download -d . \\
      --no-deps --no-build-isolation --no-binary vllm vllm=={VERSION}
  tar xf vllm-{VERSION}.tar.gz
  pip install transformers openai openai_harmony cbor2 cloudpickle cachetools xxhash blake3 regex msgspec pydantic \\
      pyzmq fastapi aiohttp psutil py-cpuinfo xgrammar partial_json_parser llguidance tqdm requests pillow \\
      pybase64 uvloop einops
(into the environment that runs the bench)"""
BLOCK = 16


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run blocks, decode steps, and the memory of a block."""
    vllm = load()
    for count in (1, 16, 256, 2048):
        _blocks(bench, vllm, count)
    _step(bench, vllm)
    _memory(bench, vllm)


def find_vllm() -> None:
    """Put vLLM on the path, and have it run offline on the host; raise PeerMissing without its folder."""
    add_to_path(NAME, FOLDER, RECIPE)
    for name, value in {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)


@cache
def load() -> Any:
    """Return the timed names as attributes of one object."""
    find_vllm()
    try:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.block_pool import BlockPool as TheirPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request
    except ImportError as error:
        raise unimportable(NAME, FOLDER, error, RECIPE) from error
    return argparse.Namespace(
        torch=torch,
        sampling=SamplingParams,
        pool=TheirPool,
        manager=KVCacheManager,
        spec=FullAttentionSpec,
        config=KVCacheConfig,
        group=KVCacheGroupSpec,
        request=Request,
    )


def _blocks(bench: Bench, vllm: Any, count: int) -> None:
    num_blocks = bench.pick(65_536, 4096)
    ours = BlockPool(num_blocks, order="fifo")
    theirs = vllm.pool(num_blocks, enable_caching=False, hash_block_size=BLOCK)

    def check() -> None:
        blocks, other = ours.allocate(count), theirs.get_new_blocks(count)
        np.testing.assert_array_equal(blocks, [block.block_id for block in other])
        ours.free(blocks)
        theirs.free_blocks(other)

    bench.compare(
        f"allocate + free {count:>4} blocks of {num_blocks}",
        lambda: ours.free(ours.allocate(count)),
        {NAME: lambda: theirs.free_blocks(reversed(theirs.get_new_blocks(count)))},
        check=check,
        unit="ns",
        per=count,
        each="block",
        at_most=POOL_NS_MAX if count == 256 else None,
        sizes={"num_blocks": num_blocks, "count": count},
    )


def _step(bench: Bench, vllm: Any) -> None:
    """Time a decode step of all rows: blocks allocated and tokens counted as computed."""
    rows, context = bench.pick((256, 8192), (8, 256))
    ours = PreparedRows([FULL], rows, context, 2 * context)
    theirs = _Manager(vllm, rows, context)

    def check() -> None:
        """Compare tokens and free blocks after several steps."""
        for _ in range(BLOCK):
            ours.step()
            theirs.step()
        assert [sequence.num_computed_tokens for sequence in ours.sequences] == [
            request.num_computed_tokens for request in theirs.requests
        ]
        assert ours.cache.num_available == theirs.manager.block_pool.get_num_free_blocks()

    bench.compare(
        f"decode step of {rows} rows at {context}: prepare + plan + commit",
        Job(ours.step),
        {f"{NAME} allocate_slots": Job(theirs.step)},
        check=check,
        sizes={"rows": rows, "context": context, "block_size": BLOCK},
    )


class _Manager:
    """vLLM's manager with the same rows; a step makes the calls of vLLM's scheduler for decodes."""

    def __init__(self, vllm: Any, rows: int, context: int) -> None:
        spec = vllm.spec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=vllm.torch.bfloat16)
        num_blocks = PreparedRows.num_blocks(rows, context)
        config = vllm.config(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[vllm.group(["layer"], spec)])
        self.manager = vllm.manager(
            config,
            max_model_len=2 * context + 4096,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_caching=False,
            log_stats=False,
        )
        self.requests = [self._request(vllm, i, context - i % BLOCK) for i in range(rows)]
        for request in self.requests:
            assert self.manager.allocate_slots(request, request.num_tokens) is not None
            request.num_computed_tokens = request.num_tokens

    @staticmethod
    def _request(vllm: Any, number: int, length: int) -> Any:
        sampling = vllm.sampling(max_tokens=4096)
        sampling.update_from_generation_config({}, eos_token_id=100)
        return vllm.request(
            request_id=str(number),
            prompt_token_ids=[1] * length,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            lora_request=None,
        )

    def step(self) -> None:
        manager = self.manager
        manager.new_step_starts()
        for request in self.requests:
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1


def _memory(bench: Bench, vllm: Any) -> None:
    num_blocks = bench.pick(100_000, 1000)
    tracemalloc.start()
    kept = vllm.pool(num_blocks, enable_caching=False, hash_block_size=BLOCK)
    taken, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    bench.fact("memory of the pool, pagecore", BlockPool(num_blocks).nbytes / num_blocks, "bytes a block")
    bench.fact(f"memory of the pool, {NAME}", taken / num_blocks, "bytes a block")
