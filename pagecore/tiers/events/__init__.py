"""Events of caches: the blocks that they store and remove, published to routers and indexers in vLLM's format."""

from pagecore.tiers.events.mirror import Mirror
from pagecore.tiers.events.publisher import EventPublisher
from pagecore.tiers.events.subscriber import Subscriber

__all__ = ["EventPublisher", "Mirror", "Subscriber"]
