"""Guard: deadline, verification, circuit breaker and memory budget around any store of blocks."""

from pagecore.tiers.guard.breaker import Breaker
from pagecore.tiers.guard.deadline import Deadline
from pagecore.tiers.guard.guard import Guard

__all__ = ["Breaker", "Deadline", "Guard"]
