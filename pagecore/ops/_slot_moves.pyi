from pagecore.arrays import Tensor

class SlotMoves:
    """Moves of tokens between slots of the planes of one pool."""

    def __init__(self, planes: list[Tensor], bounds: list[tuple[Tensor, Tensor, Tensor]]) -> None: ...
