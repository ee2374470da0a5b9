#include "pagecore/tiers/keys/xxh3.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#if defined(__x86_64__)
namespace pagecore::tiers {
uint64_t xxh3_64_avx2(const void* data, size_t nbytes, uint64_t seed) noexcept;
}
#endif

namespace pagecore::tiers {
namespace {

using Sum = uint64_t (*)(const void*, size_t, uint64_t) noexcept;

uint64_t xxh3_64_baseline(const void* data, size_t nbytes, uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(data, nbytes, seed);
}

Sum best_sum() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") > 0) return xxh3_64_avx2;
#endif
  return xxh3_64_baseline;
}

}  // namespace

uint64_t xxh3_64(const void* data, size_t nbytes, uint64_t seed) noexcept {
  static const Sum sum = best_sum();
  return sum(data, nbytes, seed);
}

void xxh3_128(const void* data, size_t nbytes, const uint8_t* secret, uint8_t* out) noexcept {
  const XXH128_hash_t hash = XXH3_128bits_withSecret(data, nbytes, secret, kSecretBytes);
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  __builtin_memcpy(out, canonical.digest, kHashBytes);
}

uint64_t seed_of(const uint8_t* key) noexcept { return XXH3_64bits(key, kKeyBytes); }

}  // namespace pagecore::tiers
