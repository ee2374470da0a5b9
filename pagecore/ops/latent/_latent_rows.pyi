from typing import Any

def write_latent(
    latent: Any,
    rope: Any,
    latent_cache: Any,
    rope_cache: Any,
    slot_mapping: Any,
    *,
    format: str | None = None,
    scale: float | None = None,
    stream: Any = None,
) -> None: ...
def gather_latent(
    latent_cache: Any,
    rope_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    rows: Any = None,
    null_block: bool = True,
    format: str | None = None,
    latent_scale: float | None = None,
    dtype: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Any: ...
