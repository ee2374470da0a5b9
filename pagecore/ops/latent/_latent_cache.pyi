class LatentPlanes: ...

LATENT_FORMATS: tuple[str, ...]
LATENT_ROW_BYTES: dict[str, int]
PACKED_LATENT_DIMS: tuple[int, int]
