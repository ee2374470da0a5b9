// Content hashes: 64 bits that name a block together with everything before it, equal in every process.
//
//   block 0   hash = XXH3(tokens, seed = root)                    root: 0, or the hash of the namespace
//   block i   hash = XXH3(tokens, seed = hash of block i - 1)     tokens are little-endian int32
//   for each mark of the block, in order: hash = XXH3(start, end, kind, 32 bytes of the digest; seed = hash)
//
// Other than the hashes of the child map they have no secret: a client can prepare collisions. They name blocks in
// messages and never decide what is reused.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#define XXH_INLINE_ALL
#include "xxhash.h"

#include "pagecore/index/radix/nodes/key.hpp"

namespace pagecore::radix {

using ContentHash = uint64_t;

[[nodiscard]] inline ContentHash hash_mark(const Mark& mark, ContentHash seed) {
  std::array<uint8_t, 20 + sizeof(mark.digest.bytes)> packed;
  std::memcpy(packed.data(), &mark.start, 8);
  std::memcpy(packed.data() + 8, &mark.end, 8);
  std::memcpy(packed.data() + 16, &mark.digest.kind, 4);
  std::memcpy(packed.data() + 20, mark.digest.bytes.data(), mark.digest.bytes.size());
  return XXH3_64bits_withSeed(packed.data(), packed.size(), seed);
}

// Hash of one block; `marks` are sorted, and those of `block` count.
[[nodiscard]] inline ContentHash hash_block(ContentHash parent, const int32_t* tokens, int64_t block_size,
                                            std::span<const Mark> marks, int64_t block) {
  ContentHash hash = XXH3_64bits_withSeed(tokens, static_cast<size_t>(block_size) * sizeof(int32_t), parent);
  const Mark* const end = marks.data() + marks.size();
  for (const Mark* mark = first_mark_from(marks, block); mark != end && mark->block == block; ++mark) {
    hash = hash_mark(*mark, hash);
  }
  return hash;
}

[[nodiscard]] inline ContentHash hash_bytes(const char* bytes, size_t size, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes, size, seed);
}

}  // namespace pagecore::radix
