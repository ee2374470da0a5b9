ELEMENTS: tuple[str, ...]
FORMATS: tuple[str, ...]

def latent_launch_shape(arguments: tuple[str, ...]) -> tuple[int, int]: ...
def launch_shape(entry: str, arguments: tuple[str, ...]) -> tuple[int, int] | None: ...
def prefill_variants() -> tuple[str, ...]: ...
def swap_prefill_variant(name: str) -> str: ...
def attention_kernel(
    head_dim: int,
    value_dim: int,
    query_dtype: str,
    key_dtype: str,
    value_dtype: str,
    *,
    key_format: int = 0,
    value_format: int = 0,
    aligned: bool = True,
    aligned_scales: bool = True,
    full: bool = False,
    selected: bool = False,
    sealed: bool = False,
    sealed_matrix: bool = False,
    decode: bool = False,
) -> str: ...
