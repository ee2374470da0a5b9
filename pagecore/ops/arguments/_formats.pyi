from pagecore.arrays.dtypes.formats import FORMATS as FORMATS

NAMES: tuple[str | None, ...]
FOUR_OVER_SIX: str

class StoredCache: ...
