"""Targets that more than one bench holds its figures against: the most that a call may take."""

# allocate + free of 256 blocks, for each of them.
POOL_NS_MAX = 5.0
# SlotAllocator.extend of 32 sequences of 1,024 tokens.
EXTEND_US_MAX = 100.0
# SlotAllocator.decode of 256 sequences.
DECODE_US_MAX = 10.0
