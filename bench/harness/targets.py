"""Targets of the benches: maximum times and minimum ratios."""

from types import MappingProxyType

# allocate + free of 256 blocks, per block.
POOL_NS_MAX = 5.0
# SlotAllocator.extend of 32 sequences of 1,024 tokens.
EXTEND_US_MAX = 100.0
# SlotAllocator.decode of 256 sequences.
DECODE_US_MAX = 10.0
# Sequences in the RadixTree that has targets: 1,024 tokens each, in groups that share 512.
PREFIX_SEQUENCES = 10_000
# match of 1,024 tokens in cache, by block size; insert; a second lock and unlock of a path; eviction of one leaf.
MATCH_US_MAX = {1: 4.0, 16: 2.5, 64: 2.5}
INSERT_US_MAX = 8.0
LOCK_US_MAX = 0.3
EVICT_US_MAX = 1.0
# Time of evicting one of 10,000 leaves, as a share of the time with 100,000.
FLATNESS_MIN = 0.5
# 0.5 s for 100,000 leaves, per leaf.
DRAIN_NS_MAX = 5000.0
# Speed-up over the native radix tree of SGLang 0.5.23 with equally many sequences.
SGLANG_RATIO_MIN = MappingProxyType({"match, hit, warm": 3.0, "insert, warm": 3.0, "evict a leaf, warm": 100.0})
# Host attention: a decode step from DRAM as a share of a read of the same bytes on the same number of threads, and
# decode and prefill as multiples of torch's SDPA, by dtype.
DECODE_READ_RATIO_MIN = MappingProxyType({"float32": 0.85, "bfloat16": 0.80})
DECODE_SDPA_RATIO_MIN = MappingProxyType({"float32": 1.3, "bfloat16": 2.1})
PREFILL_SDPA_RATIO_MIN = MappingProxyType({"float32": 1.2, "bfloat16": 1.5})
# A cached decode step of one sequence of 1,024 tokens, with AMX on two threads.
IN_CACHE_AMX_GB_PER_S_MIN = 30.0
# Decode by block size, as a share of the speed with block size 16.
BLOCK_SIZE_RATIO_MIN = MappingProxyType({1: 0.7, 8: 0.95, 64: 0.95, 256: 0.95})
# Latent decode: with 16 heads as a share of a read of the same bytes on two threads, with 128 heads as a share of the
# rate of bfloat16 matrix products.
LATENT_READ_RATIO_MIN = 0.6
LATENT_PRODUCT_RATIO_MIN = 0.5
# Slot-mapped writes as multiples of NumPy fancy indexing, by the number of tokens.
WRITE_RATIO_MIN = MappingProxyType({8: 1.0, 64: 1.0, 2048: 1.7})
# Quantised caches: decode from DRAM on two threads as a multiple of the tokens a second over bfloat16, by the bits of a
# code, and the write of whole blocks as a share of the bytes that a write of bfloat16 reads in a second.
FORMAT_DECODE_RATIO_MIN = MappingProxyType({8: 1.6, 4: 2.2})
FORMAT_WRITE_RATIO_MIN = 0.5
# Against the 8-bit cache of OpenVINO.
FORMAT_PEER_RATIO_MIN = 1.0
# A call of an operator through torch's dispatcher.
DISPATCH_US_MAX = 10.0
# A get of 1 MiB entries from disk, sums included, as a share of raw preadv of the same slots on 8 threads.
DISK_READ_RATIO_MIN = 0.9
# A get of 1 MiB entries from Redis over a Unix socket, sums included, as a multiple of redis-py with a call each.
REDIS_RATIO_MIN = 3.0
# On a GPU: writes and moves as a share of a device-to-device copy of the same bytes; decode as a share of the rate of
# such a copy, and the time of one sequence of 4,096 tokens; a prompt of 8,192 tokens as a share of the rate of a matrix
# product.
GPU_MOVE_RATIO_MIN = 0.85
GPU_DECODE_RATIO_MIN = 0.80
GPU_DECODE_ONE_US_MAX = 16.0
GPU_PREFILL_RATIO_MIN = 0.28
# Decode over an eighth of the blocks on a GPU, its plan included, as a multiple of the speed of full attention: the
# launch of the plan and of a second kernel leaves half of the eightfold.
GPU_SELECTED_RATIO_MIN = 4.0
