// Content keys of the blocks of a prompt.
//
// The hash of a block covers its tokens and, through the hash of the block before it, everything that precedes them:
//
//   hash[i] = H(header | hash[i - 1] | namespace | spans of block i | int32 ids of block i)
//
// `header` has the schema and the digest of the fingerprint; hash[-1] is zeros. The namespace is a count of bytes and
// its digest for block 0, and the count 0 for the others. The spans are a count, and for each its place and digest,
// whose lengths precede them; the caller packs them. All integers are little-endian. H is XXH3_128 with a secret that
// follows from the fingerprint.
#pragma once

#include <cstdint>
#include <span>

namespace pagecore::tiers {

// Spans of the blocks that have any: block numbers, ascending, and the packed spans of each.
struct PackedSpans {
  std::span<const int64_t> blocks;
  std::span<const int64_t> ends;  // of the bytes of each block in `bytes`
  std::span<const uint8_t> bytes;
};

struct ChainStart {
  std::span<const uint8_t> header;
  std::span<const uint8_t> space;  // count and digest of the namespace
  const uint8_t* secret;           // kSecretBytes
};

// Writes the hash of each whole block to out, kHashBytes each. Allocates the message once.
void hash_chain(const ChainStart& start, std::span<const int32_t> ids, int64_t block_size, const PackedSpans& spans,
                uint8_t* out);

}  // namespace pagecore::tiers
