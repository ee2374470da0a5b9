from pagecore.arrays import Tensor

class SlotMoves:
    """Moves of tokens between slots of the planes of one pool."""

    def __new__(
        cls, planes: list[Tensor], bounds: list[tuple[Tensor, Tensor, Tensor]], stream: int = 0
    ) -> SlotMoves: ...
