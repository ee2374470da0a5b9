from typing import final

@final
class Allocation:
    @property
    def nbytes(self) -> int: ...
