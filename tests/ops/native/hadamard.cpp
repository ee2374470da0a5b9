// Hadamard transforms of rows of any strides: the bits of a scalar transform, within bounds, also in place.
#include "pagecore/ops/cpu/codecs/hadamard.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "tests/ops/native/floats.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

// Transforms one block in float32, in the order of the kernels.
void transform_block(std::vector<float>& block) {
  for (size_t step = 1; step < block.size(); step *= 2) {
    for (size_t i = 0; i < block.size(); ++i) {
      if ((i & step) != 0) continue;
      const float low = block[i], high = block[i + step];
      block[i] = low + high;
      block[i + step] = low - high;
    }
  }
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block.size())));
  for (float& number : block) number *= scale;
}

void transform_some(Random& random) {
  const Float type = random.pick(kFloats);
  const int64_t outer = random.between(0, 5), inner = random.between(1, 5), dim = 8 * random.between(1, 70);
  const ArrayStyle style{true, true, true};
  const Array source(random, {outer, inner, dim}, size_of(type), style),
      other(random, {outer, inner, dim}, size_of(type), style);
  const bool in_place = random.one_in(3);
  const Array& target = in_place ? source : other;
  std::vector<char> expected = target.memory().copy();
  std::vector<float> block(static_cast<size_t>(hadamard_block(dim)));
  for (int64_t at = 0; at < outer * inner * dim; at += std::ssize(block)) {
    const std::vector<int64_t> place{at / dim / inner, at / dim % inner, at % dim};
    const char* const from = source.at(place);
    for (size_t i = 0; i < block.size(); ++i) {
      block[i] = static_cast<float>(widen(type, from + static_cast<int64_t>(i) * size_of(type)));
    }
    transform_block(block);
    char* const to = expected.data() + target.offset(place);
    for (size_t i = 0; i < block.size(); ++i) narrow(type, block[i], to + static_cast<int64_t>(i) * size_of(type));
  }
  HadamardRows rows;
  rows.source = source.data();
  rows.target = target.data();
  rows.type = type;
  rows.outer = outer;
  rows.inner = inner;
  rows.dim = dim;
  rows.source_outer_stride = source.stride(0);
  rows.source_inner_stride = source.stride(1);
  rows.target_outer_stride = target.stride(0);
  rows.target_inner_stride = target.stride(1);
  hadamard(rows, random.between(1, 3));
  source.memory().check();
  target.memory().check();
  for (int64_t at = 0; at < target.memory().size(); at += size_of(type)) {
    PC_CHECK(same_number(type, target.memory().data() + at, expected.data() + at), "byte ", at, " of rows of ", dim);
  }
}

}  // namespace

PC_TEST(rows_are_transformed_within_bounds) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(200, transform_some);
  }
  set_isa("");
}
