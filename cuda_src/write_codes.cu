// Slot-mapped write into a quantised cache: scales and codes of new rows.
//
//   row      one head of one token; a group of 2 to 32 lanes of a warp processes it, numbered across tokens and heads
//   chunk    8 elements of a row: 16 bytes of 16-bit elements or 32 of float32, and 8 or 4 bytes of codes
//
//              chunks of a row
//            | 0 | 1 | 2 | 3 | ...       lane l of the row has chunks l, l + lanes, ...
//            | group |                   16 numbers share a scale: 2 adjacent lanes; 32 numbers: 4 lanes
//
// Formats with a scale for the row read the row twice, once for the scale, and the second time from the cache of the
// multiprocessor. Every other format reads it once. Planes are the y axis of the grid. Rows without a slot are read but
// not written, because all lanes take part in the exchange of the largest numbers.
#include "formats.cuh"
#include "units.cuh"
#include "write_slots.cuh"

namespace pagecore {

constexpr float kLargestFloat = 3.402823466e38f;

PC_DEVICE float min_float(float a, float b) { return -pc_max(-a, -b); }

// The row of a lane, and the lane's place in it.
template <typename T>
struct CodeRow {
  Global<T> elements;
  Global<pc_uint8> codes;
  Global<pc_uint8> scales;
  float factor;
  int dim;
  int lane;   // of the lanes that share the row
  int lanes;
  bool in_vectors;
  bool writes;

  PC_MEMBER int steps() const { return ceil_div(ceil_div(dim, 8), lanes); }
  PC_MEMBER int first(int step) const { return 8 * (step * lanes + lane); }

  // Elements first(step) .. + 7; those past the row are 0.
  PC_MEMBER void load(int step, float (&x)[8]) const {
    const int at = first(step);
    if (in_vectors && at < dim) {
      const Unit<T, 8> unit = load_unit<T, 8, false>(elements, at);
      PC_UNROLL
      for (int i = 0; i < 8; ++i) x[i] = element(unit, i);
      return;
    }
    PC_UNROLL
    for (int i = 0; i < 8; ++i) x[i] = at + i < dim ? pc_to_float(elements.load(at + i)) : 0.0f;
  }

  // Stores the codes of these elements, one byte each.
  PC_MEMBER void store(int step, const int (&code)[8]) const {
    const int at = first(step);
    if (!writes || at >= dim) return;
    if (in_vectors) {
      pc_uint64 bytes = 0;
      PC_UNROLL
      for (int i = 0; i < 8; ++i) bytes |= static_cast<pc_uint64>(code[i] & 0xff) << 8 * i;
      codes.template as<pc_uint64>().store(at / 8, bytes);
      return;
    }
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (at + i < dim) codes.store(at + i, static_cast<pc_uint8>(code[i]));
    }
  }

  // Stores the codes of these elements, two a byte.
  PC_MEMBER void store_packed(int step, const int (&code)[8]) const {
    const int at = first(step);
    if (!writes || at >= dim) return;
    pc_uint32 bytes = 0;
    PC_UNROLL
    for (int i = 0; i < 8; ++i) bytes |= static_cast<pc_uint32>(code[i]) << 4 * i;
    if (in_vectors) {
      codes.template as<pc_uint32>().store(at / 8, bytes);
      return;
    }
    PC_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (at + 2 * i < dim) codes.store(at / 2 + i, static_cast<pc_uint8>(bytes >> 8 * i));
    }
  }

  PC_MEMBER void store_row_scale(pc_uint32 bits) const {
    if (writes && lane == 0) scales.template as<pc_uint32>().store(0, bits);
  }
  PC_MEMBER void store_group_scale(int step, int group, int byte) const {
    if (writes && first(step) < dim && first(step) % group == 0) {
      scales.store(first(step) / group, static_cast<pc_uint8>(byte));
    }
  }
};

// The range of some numbers. NaN is ignored but for `has_nan`.
struct NumberRange {
  float low;  // at most 0
  float high;
  int has_nan;

  PC_MEMBER void add(const float (&x)[8]) {
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      low = min_float(low, x[i]);
      high = pc_max(high, x[i]);
      has_nan |= x[i] != x[i] ? 1 : 0;
    }
  }
  // Joins the ranges of `lanes` adjacent lanes, a power of two.
  PC_MEMBER void join(int lanes) {
    for (int mask = 1; mask < lanes; mask *= 2) {
      low = min_float(low, pc_shuffle_xor(low, mask));
      high = pc_max(high, pc_shuffle_xor(high, mask));
      has_nan |= pc_shuffle_xor(has_nan, mask);
    }
    low = pc_max(low, -kLargestFloat);
    high = min_float(high, kLargestFloat);
  }
  PC_MEMBER float largest() const { return magnitude_of(pc_max(-low, high)); }  // never -0
};

PC_DEVICE NumberRange no_numbers() { return {0.0f, 0.0f, 0}; }

template <typename T>
PC_DEVICE NumberRange range_of_row(const CodeRow<T>& row) {
  NumberRange range = no_numbers();
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    row.load(step, x);
    range.add(x);
  }
  range.join(row.lanes);
  return range;
}

// ---- formats with a given factor

template <typename T, bool kWide>
PC_DEVICE void write_with_factor(const CodeRow<T>& row) {
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    int code[8];
    row.load(step, x);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float quotient = x[i] / row.factor;
      code[i] = kWide ? e5m2_of(quotient) : e4m3_of(quotient);
    }
    row.store(step, code);
  }
}

// ---- formats with a scale for the row

template <typename T, bool kIsFloat>
PC_DEVICE void write_with_row_scale(const CodeRow<T>& row) {
  const NumberRange range = range_of_row(row);
  const float scale = pc_max(range.largest() / (kIsFloat ? 448.0f : 127.0f), 1e-6f), inverse = 1.0f / scale;
  const bool reads_nan = !kIsFloat && range.has_nan != 0;
  row.store_row_scale(reads_nan ? 0x7fc00000u : pc_float_to_bits(scale));
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    int code[8];
    row.load(step, x);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      code[i] = kIsFloat ? e4m3_of(x[i] * inverse) : reads_nan ? 0 : integer_of(x[i] * inverse, -128, 127);
    }
    row.store(step, code);
  }
}

template <typename T>
PC_DEVICE void write_int4(const CodeRow<T>& row) {
  const NumberRange range = range_of_row(row);
  const float scale = pc_max(min_float(range.high - range.low, kLargestFloat) / 15.0f, 1e-6f), inverse = 1.0f / scale;
  const int zero = integer_of(-range.low * inverse, 0, 15);
  const bool reads_nan = range.has_nan != 0;
  row.store_row_scale(reads_nan ? 0x7fc00000u : (pc_float_to_bits(scale) & ~15u) | static_cast<pc_uint32>(zero));
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    int code[8];
    row.load(step, x);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      code[i] = reads_nan ? 0 : integer_of(x[i] * inverse + static_cast<float>(zero), 0, 15);
    }
    row.store_packed(step, code);
  }
}

// ---- formats with a scale for each group

template <typename T>
PC_DEVICE void write_fp4_block16(const CodeRow<T>& row) {
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    int code[8];
    row.load(step, x);
    NumberRange range = no_numbers();
    range.add(x);
    range.join(2);
    const int exponent = ceil_log2(pc_max(range.largest() / 6.0f, 1e-10f));
    const float inverse = ue8m0(127 - exponent);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) code[i] = range.has_nan != 0 ? 0 : e2m1_up_of(x[i] * inverse);
    row.store_group_scale(step, 16, range.has_nan != 0 ? 255 : exponent + 127);
    row.store_packed(step, code);
  }
}

template <typename T>
PC_DEVICE void write_mxfp8(const CodeRow<T>& row) {
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    int code[8];
    row.load(step, x);
    NumberRange range = no_numbers();
    range.add(x);
    range.join(4);
    const int exponent = clamp(ceil_log2(pc_max(range.largest(), 1e-30f) / 448.0f), -127, 127);
    const float inverse = ue8m0(127 - exponent);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) code[i] = e4m3_of(x[i] * inverse);
    row.store_group_scale(step, 32, exponent + 127);
    row.store(step, code);
  }
}

// Codes of 8 numbers of a group, and the scale of the group, for a largest code of `most`.
struct Nvfp4Codes {
  int code[8];
  int scale;
};

PC_DEVICE Nvfp4Codes nvfp4_codes(const float (&x)[8], const NumberRange& range, float most, float factor) {
  Nvfp4Codes made;
  made.scale = range.has_nan != 0 ? 0x7f : e4m3_of(range.largest() / (most * factor));
  const float divisor = float_of_e4m3(made.scale) * factor;
  PC_UNROLL
  for (int i = 0; i < 8; ++i) made.code[i] = divisor == 0.0f || range.has_nan != 0 ? 0 : e2m1_of(x[i] / divisor);
  return made;
}

// The sum of squared errors of a group, whose halves are in two adjacent lanes.
PC_DEVICE float nvfp4_error(const float (&x)[8], const Nvfp4Codes& made, float factor) {
  float sum[8];
  PC_UNROLL
  for (int i = 0; i < 8; i += 2) {
    const pc_uint32 pair = halves_of_e2m1(static_cast<pc_uint32>(made.code[i] | made.code[i + 1] << 4));
    const float a = x[i] - low_half(pair) * float_of_e4m3(made.scale) * factor;
    const float b = x[i + 1] - high_half(pair) * float_of_e4m3(made.scale) * factor;
    sum[i] = a * a;
    sum[i + 1] = b * b;
  }
  PC_UNROLL
  for (int i = 0; i < 8; ++i) sum[i] += pc_shuffle_xor(sum[i], 1);
  PC_UNROLL
  for (int half = 4; half > 0; half /= 2) {
    PC_UNROLL
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  }
  return sum[0];
}

template <typename T>
PC_DEVICE void write_nvfp4(const CodeRow<T>& row, bool is_4over6) {
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    row.load(step, x);
    NumberRange range = no_numbers();
    range.add(x);
    range.join(2);
    Nvfp4Codes made = nvfp4_codes(x, range, 6.0f, row.factor);
    if (is_4over6) {
      const Nvfp4Codes other = nvfp4_codes(x, range, 4.0f, row.factor);
      const float error = nvfp4_error(x, made, row.factor), other_error = nvfp4_error(x, other, row.factor);
      if (other_error < error) made = other;
    }
    row.store_group_scale(step, 16, made.scale);
    row.store_packed(step, made.code);
  }
}

template <typename T>
PC_DEVICE CodeRow<T> load_code_row(const PcCodeParams& params, const PcCodePlane& plane) {
  CodeRow<T> row;
  const int number = static_cast<int>((static_cast<pc_int64>(pc_block_x()) * pc_num_threads() + pc_thread()) >>
                                      plane.lanes_shift);
  const bool exists = number < plane.num_rows;
  const int token = divide(exists ? number : 0, plane.num_heads);
  const int head = exists ? number - token * plane.num_heads.divisor : 0;
  const pc_int64 slot = exists ? load_index(params.slots, token) : -1;
  // As an unsigned number a negative slot is past the end.
  row.writes = static_cast<pc_uint64>(slot) < static_cast<pc_uint64>(params.num_slots);
  const SlotPosition position = position_of(row.writes ? slot : 0, params.block_size, params.block_shift);
  const PcCache& codes = plane.stored.codes;
  const PcScales& scales = plane.stored.scales;
  row.elements = Global<T>(plane.rows.data) + (token * plane.rows.token_stride + head * plane.rows.head_stride);
  row.codes = Global<pc_uint8>(codes.data) + (position.block * codes.block_stride +
                                              position.offset * codes.token_stride + head * codes.head_stride);
  row.scales = Global<pc_uint8>(scales.data);
  if (scales.data != 0) {
    row.scales = row.scales + (position.block * scales.block_stride + position.offset * scales.token_stride +
                               head * scales.head_stride);
  }
  row.factor = plane.factors != 0 ? Global<float>(plane.factors).load(head) : plane.factor;
  row.dim = plane.dim;
  row.lanes = 1 << plane.lanes_shift;
  row.lane = pc_lane() & (row.lanes - 1);
  row.in_vectors = plane.in_vectors != 0;
  return row;
}

template <typename T>
PC_KERNEL(128, 4)
void write_codes(const PcCodeParams params) {
  const PcCodePlane& plane = params.planes[pc_block_y()];
  const CodeRow<T> row = load_code_row<T>(params, plane);
  switch (plane.stored.format) {
    case PC_E4M3: return write_with_factor<T, false>(row);
    case PC_E5M2: return write_with_factor<T, true>(row);
    case PC_E4M3_TOKEN: return write_with_row_scale<T, true>(row);
    case PC_I8_TOKEN: return write_with_row_scale<T, false>(row);
    case PC_I4_TOKEN: return write_int4(row);
    case PC_FP4_BLOCK16: return write_fp4_block16(row);
    case PC_NVFP4: return write_nvfp4(row, plane.is_4over6 != 0);
    case PC_MXFP8: return write_mxfp8(row);
    default: return;
  }
}

}  // namespace pagecore
