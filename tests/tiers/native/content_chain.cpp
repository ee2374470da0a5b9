// Chains of content keys on memory of exact sizes, and sums with every instruction set of the machine.
#include "pagecore/tiers/keys/content_chain.hpp"

#include <cstring>

#include "pagecore/tiers/keys/xxh3.hpp"
#include "tests/native/harness.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::tiers;

namespace {

Exact<uint8_t> noise(Random& random, size_t size) {
  Exact<uint8_t> bytes(size);
  for (uint8_t& each : bytes.span()) each = static_cast<uint8_t>(random.bits());
  return bytes;
}

}  // namespace

PC_TEST(sums_equal_those_of_the_header) {
  rounds(200, [](Random& random) {
    const Exact<uint8_t> data = noise(random, static_cast<size_t>(random.below(5000)));
    const uint64_t seed = random.bits();
    PC_CHECK(xxh3_64(data.data(), data.size(), seed) == XXH3_64bits_withSeed(data.data(), data.size(), seed),
             data.size());
  });
}

PC_TEST(a_chain_is_that_of_its_prefix) {
  rounds(100, [](Random& random) {
    const Exact<uint8_t> header = noise(random, 48), space = noise(random, random.pick({size_t{4}, size_t{36}}));
    const Exact<uint8_t> secret = noise(random, kSecretBytes);
    const int64_t size = random.between(1, 40), blocks = random.between(1, 9);
    std::vector<int32_t> ids(static_cast<size_t>(size * blocks + random.below(size)));
    for (int32_t& id : ids) id = static_cast<int32_t>(random.bits());
    const Exact<int32_t> exact(ids);
    std::vector<int64_t> reached, ends;
    std::vector<uint8_t> packed;
    for (int64_t block = 0; block < blocks; ++block) {
      if (!random.one_in(3)) continue;
      packed.insert(packed.end(), static_cast<size_t>(random.between(1, 60)), static_cast<uint8_t>(block));
      reached.push_back(block);
      ends.push_back(static_cast<int64_t>(packed.size()));
    }
    const Exact<uint8_t> bytes(packed);
    const PackedSpans spans{reached, ends, bytes.span()};
    const ChainStart start{header.span(), space.span(), secret.data()};
    Exact<uint8_t> whole(static_cast<size_t>(blocks) * kHashBytes);
    hash_chain(start, exact.span(), size, spans, whole.data());
    const int64_t fewer = random.between(1, blocks);
    Exact<uint8_t> part(static_cast<size_t>(fewer) * kHashBytes);
    hash_chain(start, exact.span().first(static_cast<size_t>(fewer * size)), size, spans, part.data());
    PC_CHECK(std::memcmp(whole.data(), part.data(), part.size()) == 0, "of ", fewer, " blocks");
  });
}

PC_TEST(invalid_spans_are_refused) {
  const std::vector<uint8_t> bytes(kSecretBytes);
  const ChainStart start{bytes, bytes, bytes.data()};
  const std::vector<int32_t> ids(8);
  std::vector<uint8_t> out(2 * kHashBytes);
  const std::vector<int64_t> blocks{1, 0}, ends{2, 3}, one{0}, far{999};
  PC_REFUSES(ShapeError, hash_chain(start, ids, 0, {}, out.data()));
  PC_REFUSES(ShapeError, hash_chain(start, ids, 4, {blocks, ends, bytes}, out.data()));
  PC_REFUSES(ShapeError, hash_chain(start, ids, 4, {one, ends, bytes}, out.data()));
  PC_REFUSES(ShapeError, hash_chain(start, ids, 4, {one, far, bytes}, out.data()));
}
