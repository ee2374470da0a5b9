from collections.abc import Sequence as Listed

from numpy.typing import ArrayLike

class DraftIds:
    def __init__(self, draft_ids: Listed[ArrayLike | None]) -> None: ...
