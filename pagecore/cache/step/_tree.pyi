from typing import Any

from pagecore.cache.step._plan import StepPlan

class StepTree:
    """The parents of the new tokens of each sequence of a step; see `PagedKVCache.prepare`."""

    def __new__(cls, parents: Any) -> StepTree: ...
    def num_words(self, plan: StepPlan) -> int: ...
