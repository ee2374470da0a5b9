NAMES: tuple[str | None, ...]
FOUR_OVER_SIX: str
PAIRS: str

class StoredCache: ...
