"""Every example runs unmodified, if the frameworks that it imports are installed, and prints its promised line."""

import re
from pathlib import Path

import pytest

from tests.capabilities import require

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PROMISED = {
    "engine": "every output equals that of the model without a cache: True",
    "engine_overlap": "every output equals that of the model without a cache: True",
    "engine_speculation": "every output equals that of the model without a cache: True",
    "engine_cache": "every output equals that of the model without a cache: True",
    "tiny_llama": "the model draws the same tokens again: True",
    "torch_batching": "same tokens as alone: True",
    "transformers_generate": "gpt_neox     identical to DynamicCache",
    "transformers_generate_batch": "identical to SDPA",
    "transformers_hybrid": "granitemoehybrid identical to DynamicCache",
    "transformers_whisper": "whisper  identical to its own cache; 188 blocks of encoder tokens, held 564 times",
    "own_request_table": "0 blocks held after all requests have left",
    "speculative_decode": "every token equals greedy decoding",
    "tiny_windows": "greedy decoding: 3 1 4 1 5",
    "tree_decode": "every token equals greedy decoding",
    "scheduler_loop": "request 0 is cancelled after",
    "kv_events": "42,768 of 50,240 prompt tokens were reused; the router expected 42,768",
    "hybrid_loop": "all tokens of 12 requests equal those computed from scratch: True",
    "eviction_rank": "rank 24% of the tokens reused",
    "quest_pages": "the error with a quarter of the pages is below 0.05: True",
    "prefill_decode": "all 24 tokens of 6 requests equal those of one process: True",
    "snapkv": "the error is below 0.05: True",
    "shared_store": "the second process reused 720 of 750 tokens; every reused value was verified",
}
# Sizes of examples that take them: the default sizes take half a minute.
ARGUMENTS = {"transformers_generate": ["3"], "transformers_generate_batch": ["2", "72"], "transformers_hybrid": ["3"]}
ARGUMENTS |= {"transformers_whisper": ["4"]}
SLOW = {"transformers_generate", "transformers_generate_batch", "transformers_hybrid", "transformers_whisper"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW), id=path.stem)
        for path in sorted((ROOT / "examples").glob("*.py"))
    ],
)
def test_the_example_runs(path, interpreters):
    frameworks = re.findall(r"^(?:from|import) (torch|transformers|jax)\b", path.read_text(), re.MULTILINE)
    for framework in frameworks:
        require(framework)
    ran = interpreters.run_with_frameworks(frameworks, path, *ARGUMENTS.get(path.stem, []))
    assert ran.returncode == 0, ran.stderr
    assert PROMISED.get(path.stem, "\n") in ran.stdout


SPOILT = """
import itertools, runpy, sys
from pagecore import PagedKVCache, serving

Request = serving.Request


def short(number, prompt, new_tokens, *rest, **options):
    return Request(number, prompt, min(new_tokens, 12), *rest, **options)


serving.Request = short

attend, calls = PagedKVCache.attend, itertools.count()


def spoilt(self, layer, query, batch, **options):
    attended = attend(self, layer, query, batch, **options)
    return -attended if 90 <= next(calls) < 120 else attended


PagedKVCache.attend = spoilt
for path in sys.argv[1:]:
    calls = itertools.count()
    print("status", runpy.run_path(path)["main"]())
"""


def test_engines_notice_wrong_attention(interpreters):
    require("torch")
    paths = sorted((ROOT / "examples").glob("engine*.py"))
    ran = interpreters.run_with_frameworks(["torch"], SPOILT, *map(str, paths), path=[ROOT / "examples"])
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("status 1") == len(paths) == 4
