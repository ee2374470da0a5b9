// Batches of groups that share a scale: no lane after the last group of a batch makes it unusual.
#include "tests/ops/native/tile_cases.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

void quantise_equal_groups(Random& random) {
  const int64_t rows = random.between(1, 9);
  const int64_t groups = random.one_in(4) ? random.between(250, 530) : random.between(1, 20);
  const auto magnitude = static_cast<float>(std::ldexp(1.0, static_cast<int>(random.between(-20, 20))));
  const Numbers<uint16_t> numbers(random, rows * groups * 16);
  for (int64_t i = 0; i < rows * groups * 16; ++i) {
    narrow(Float::BF16, random.one_in(2) ? magnitude : -magnitude, reinterpret_cast<char*>(&numbers[i]));
  }
  for (const Products* level : levels()) {
    const Numbers<char> codes(random, rows * groups * 8), scales(random, rows * groups);
    const bool usual = level->are_usual(magnitude, reinterpret_cast<const char*>(numbers.data()), rows, groups,
                                        codes.data(), scales.data());
    PC_CHECK(usual, level->name, ": ", rows, " rows of ", groups, " groups of ", magnitude);
    for (const char code : codes.bytes()) PC_CHECK(code == 0, level->name);
    for (const char scale : scales.bytes()) PC_CHECK(scale == 0, level->name);
  }
}

}  // namespace

PC_TEST(lanes_after_the_last_group_leave_a_batch_usual) { rounds(40, quantise_equal_groups); }
