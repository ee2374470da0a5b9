// xxHash (Y. Collet, third_party/xxhash.h) for content keys and for the sums of payloads.
//
// The sums run over every byte that a store moves. On x86-64 they use AVX2 where the machine has it; the results are
// equal on every machine. Calls are free of locks and allocations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagecore::tiers {

inline constexpr size_t kSecretBytes = 192;
inline constexpr size_t kHashBytes = 16;
inline constexpr size_t kKeyBytes = kHashBytes + 1;  // hash, lane

// XXH3_64bits_withSeed.
[[nodiscard]] uint64_t xxh3_64(const void* data, size_t nbytes, uint64_t seed) noexcept;

// XXH3_128bits_withSecret in its canonical order of bytes.
void xxh3_128(const void* data, size_t nbytes, const uint8_t* secret, uint8_t* out) noexcept;

// The seed of the sum of a payload: XXH3_64bits of its content key, so that the payload of another key does not pass.
[[nodiscard]] uint64_t seed_of(const uint8_t* key) noexcept;

}  // namespace pagecore::tiers
