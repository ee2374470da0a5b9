"""Content keys of blocks and states, the fingerprint of model and layout, and sums of payloads."""

from pagecore.tiers.keys.chain import Span, content_chain, lane_keys, namespace_digest, payload_sum, payload_sums
from pagecore.tiers.keys.fingerprint import Fingerprint

__all__ = ["Fingerprint", "Span", "content_chain", "lane_keys", "namespace_digest", "payload_sum", "payload_sums"]
