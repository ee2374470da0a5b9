NAMES: tuple[str | None, ...]
FOUR_OVER_SIX: str

class StoredCache: ...
