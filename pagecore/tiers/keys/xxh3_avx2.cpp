// XXH3 with AVX2, for machines that have it. xxh3.cpp selects it.
//
// Nothing but headers of C may follow the pragma: an inline function of C++ would be compiled with AVX2, and the linker
// might keep that copy for the whole library.
#if defined(__x86_64__)
#pragma GCC target("avx2")
#include <immintrin.h>

#define XXH_VECTOR 2  // XXH_AVX2
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace pagecore::tiers {

uint64_t xxh3_64_avx2(const void* data, size_t nbytes, uint64_t seed) noexcept;
uint64_t xxh3_64_avx2(const void* data, size_t nbytes, uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(data, nbytes, seed);
}

}  // namespace pagecore::tiers
#endif
