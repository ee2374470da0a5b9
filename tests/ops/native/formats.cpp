// Codes and scales of every format: write_kv stores the bytes of quantize, within bounds, and bytes between rows must
// not change. The bits themselves are compared with the plain twin by the tests in Python.
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "tests/ops/native/floats.hpp"
#include "tests/ops/native/hooks.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

constexpr float kFactor = 0.4f;

// The cache of a format with rows of `dim` numbers; it has no memory.
Cache shape_of(Format format, int64_t dim) {
  Cache cache;
  cache.format = format;
  cache.dim = dim;
  return cache;
}

int64_t any_dim(Random& random, Format format) {
  switch (format) {
    case Format::I4Token: return 2 * random.between(1, 70);
    case Format::FP4Block16:
    case Format::NVFP4: return 16 * random.between(1, 20);
    case Format::MXFP8: return 32 * random.between(1, 10);
    default: return random.between(1, 140);
  }
}

Format any_format(Random& random) { return static_cast<Format>(random.between(1, 8)); }

bool takes_factor(Format format) { return format == Format::E4M3 || format == Format::E5M2 || format == Format::NVFP4; }

Codec codec_of(const Array& numbers, Float type, const Guarded& codes, const Guarded& scales, Format format) {
  const Cache shape = shape_of(format, numbers.shape(1));
  Codec codec;
  codec.numbers = numbers.data();
  codec.numbers_stride = numbers.stride(0);
  codec.codes = codes.data();
  codec.codes_stride = row_bytes(shape);
  codec.scales = scale_bytes(shape) == 0 ? nullptr : scales.data();
  codec.scales_stride = scale_bytes(shape);
  codec.num_rows = numbers.shape(0);
  codec.dim = shape.dim;
  codec.type = type;
  codec.format = format;
  if (takes_factor(format)) codec.factors = &kFactor;
  codec.num_factors = takes_factor(format) ? 1 : 0;
  return codec;
}

void convert_some(Random& random) {
  const Format format = any_format(random);
  const Float type = random.pick(kFloats);
  const int64_t rows = random.between(0, 40), dim = any_dim(random, format);
  const Cache shape = shape_of(format, dim);
  const Array numbers(random, {rows, dim}, size_of(type), {true, random.one_in(2), true});
  const Guarded codes(rows * row_bytes(shape), random.below(64)),
      scales(rows * scale_bytes(shape), 4 * random.below(9));
  Codec codec = codec_of(numbers, type, codes, scales, format);
  codec.four_over_six = random.one_in(2);
  quantize(codec, random.between(1, 3));
  codes.check();
  scales.check();
  dequantize(codec, random.between(1, 3));
  numbers.memory().check();
}

void write_some(Random& random) {
  const Format format = any_format(random);
  const Float type = random.pick(kFloats);
  const int64_t tokens = random.between(1, 70), blocks = random.between(1, 5), block_size = random.pick({1, 3, 16, 32}),
                heads = random.between(1, 4), dim = any_dim(random, format);
  const Cache shape = shape_of(format, dim);
  const Array rows(random, {tokens, heads, dim}, size_of(type), {true, random.one_in(2), true});
  const Array codes(random, {blocks, block_size, heads, row_bytes(shape)}, 1, {true, true, true});
  const int64_t scale_size = std::max<int64_t>(scale_bytes(shape), 1);
  const Array scales(random, {blocks, block_size, heads, scale_size}, 1, {true, true, true});
  std::vector<int64_t> slots;
  while (std::ssize(slots) < tokens) slots.push_back(random.between(-1, blocks * block_size - 1));
  std::vector<char> expected = codes.memory().copy(), expected_scales = scales.memory().copy();
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t slot = slots[static_cast<size_t>(token)];
    for (int64_t head = 0; head < heads && slot >= 0; ++head) {
      const Guarded row(row_bytes(shape), 0), of_row(scale_size, 0);
      Codec codec;
      codec.numbers = rows.at({token, head, 0});
      codec.codes = row.data();
      codec.scales = scale_bytes(shape) == 0 ? nullptr : of_row.data();
      codec.num_rows = 1;
      codec.dim = dim;
      codec.type = type;
      codec.format = format;
      codec.factors = &kFactor;
      codec.num_factors = takes_factor(format) ? 1 : 0;
      quantize(codec);
      const std::vector<int64_t> at{slot / block_size, slot % block_size, head, 0};
      std::memcpy(expected.data() + codes.offset(at), row.data(), static_cast<size_t>(row.size()));
      if (codec.scales == nullptr) continue;
      std::memcpy(expected_scales.data() + scales.offset(at), of_row.data(), static_cast<size_t>(of_row.size()));
    }
  }
  hooks = {random.one_in(2), static_cast<int32_t>(random.pick({0, 0, 1, 3}))};
  WriteArgs args;
  args.key = as_rows(rows, type);
  args.key_cache = as_cache(codes, format == Format::E5M2 ? DType::F8E5M2 : DType::F8E4M3FN);
  args.key_cache.format = format;
  args.key_cache.dim = dim;
  if (scale_bytes(shape) != 0) {
    args.key_cache.scales = {scales.data(), scales.stride(0), scales.stride(1), scales.stride(2)};
  }
  if (takes_factor(format)) args.key_scale = {reinterpret_cast<const char*>(&kFactor), Float::F32, 0};
  args.value = args.key;
  args.value_cache = args.key_cache;
  args.value_scale = args.key_scale;
  const Ids ids(random, slots);
  args.slots = ids.indices();
  write_kv(args);
  same_bytes(codes, expected, "codes");
  same_bytes(scales, expected_scales, "scales");
}

}  // namespace

PC_TEST(formats_convert_within_bounds) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(300, convert_some);
  }
  set_isa("");
}

PC_TEST(formats_write_the_bytes_of_quantize_and_nothing_else) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(300, write_some);
  }
  hooks = {};
  set_isa("");
}
