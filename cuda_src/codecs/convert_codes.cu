// Conversion of stored rows between formats: plain numbers or codes are read, and numbers or codes are written.
//
//   row      one head of one token of a block; a group of 1 to 32 lanes of a warp processes it
//   chunk    8 numbers of a row: 16 or 32 bytes of plain numbers, 8 or 4 bytes of codes
//
//              chunks of a row
//            | 0 | 1 | 2 | 3 | ...       lane l of the row has chunks l, l + lanes, ...
//
// Rows are numbered over the tokens and heads of a block along the x axis of the grid; the y axis has the pairs of
// blocks. Numbers pass through float32 registers, one chunk of a lane at a time. A format with a scale for the row
// reads the row twice, the second time from the cache of the multiprocessor; everything else is read once.
#include "cuda_src/codecs/code_writers.cuh"
#include "cuda_src/codecs/convert_pairs.cuh"
#include "cuda_src/latent/rows/numbers.cuh"

namespace pagecore {

// A row of the source in any format, and the codes that it becomes.
struct ConvertRow : CodeTarget {
  Global<pc_uint8> elements;
  Global<pc_uint8> own_scales;
  CodeScale own_scale;  // of the row; 1 for formats with scales of groups
  float own_factor;     // given
  PcFormat own_format;
  PcFloat own_type;
  bool loads_vectors;

  // 8 codes from `at` on.
  PC_MEMBER pc_uint64 load_codes(int at) const {
    const bool packed = pc_is_packed(own_format);
    if (loads_vectors) {
      if (packed) return elements.template as<pc_uint32>().load(at / 8);
      return elements.template as<pc_uint64>().load(at / 8);
    }
    const int end = packed ? dim / 2 : dim, begin = packed ? at / 2 : at;
    pc_uint64 bytes = 0;
    for (int i = 0; i < (packed ? 4 : 8) && begin + i < end; ++i) {
      bytes |= static_cast<pc_uint64>(elements.load(begin + i)) << 8 * i;
    }
    return bytes;
  }

  PC_MEMBER void load(int step, float (&x)[8]) const {
    const int at = first(step);
    if (own_format == PC_PLAIN) return load_chunk(elements.address(), own_type, at, dim, loads_vectors, x);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) x[i] = 0.0f;
    if (at >= dim) return;
    CodeScale scale = own_scale;
    if (pc_group_of(own_format) != 0) scale = group_scale(own_format, own_scales.load(at / pc_group_of(own_format)));
    const pc_uint64 codes = load_codes(at);
    const int bits = pc_is_packed(own_format) ? 8 : 16;  // of two codes
    PC_UNROLL
    for (int i = 0; i < 4; ++i) {
      const pc_uint32 pair =
          halves_of_codes(own_format, static_cast<pc_uint32>(codes >> bits * i) & 0xffffu, scale.zero_point);
      // Scales of e4m3 times codes are exact, so that one product is rounded.
      if (at + 2 * i < dim) x[2 * i] = low_half(pair) * scale.factor * own_factor;
      if (at + 2 * i + 1 < dim) x[2 * i + 1] = high_half(pair) * scale.factor * own_factor;
    }
  }
};

template <typename T>
PC_DEVICE void write_numbers(const ConvertRow& row) {
  const Global<T> target = row.codes.template as<T>();
  for (int step = 0; step < row.steps(); ++step) {
    const int at = row.first(step);
    float x[8];
    row.load(step, x);
    if (!row.writes || at >= row.dim) continue;
    if (row.in_vectors) {
      store_unit(target, at, unit_of<T>(x));
      continue;
    }
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (at + i < row.dim) target.store(at + i, pc_from_float<T>(x[i]));
    }
  }
}

PC_DEVICE void write_numbers(const ConvertRow& row, PcFloat type) {
  if (type == PC_FLOAT32) return write_numbers<float>(row);
  if (type == PC_FLOAT16) return write_numbers<pc_half>(row);
  write_numbers<pc_bfloat16>(row);
}

// The place of a row in its block, and the parts of it that all blocks share.
struct ConvertPlace {
  ConvertRow row;
  int token;
  int head;
};

PC_DEVICE float factor_of(pc_address factors, int stride, float factor, int head) {
  return factors != 0 ? Global<float>(factors).load(head * stride) : factor;
}

PC_DEVICE ConvertPlace convert_place(const PcConvertParams& params) {
  ConvertPlace place;
  const int number =
      static_cast<int>((static_cast<pc_int64>(pc_block_x()) * pc_num_threads() + pc_thread()) >> params.lanes_shift);
  const bool exists = number < params.num_rows;  // lanes of other rows take part in the exchange of numbers
  place.token = divide(exists ? number : 0, params.num_heads);
  place.head = exists ? number - place.token * params.num_heads.divisor : 0;
  ConvertRow& row = place.row;
  row.writes = exists;
  row.factor = factor_of(params.target_factors, params.target_factor_stride, params.target_factor, place.head);
  row.own_factor = factor_of(params.source_factors, params.source_factor_stride, params.source_factor, place.head);
  row.own_format = params.source.format;
  row.own_type = params.source.type;
  row.dim = params.dim;
  row.lanes = 1 << params.lanes_shift;
  row.lane = pc_lane() & (row.lanes - 1);
  row.in_vectors = params.target_in_vectors != 0;
  row.loads_vectors = params.source_in_vectors != 0;
  return place;
}

PC_DEVICE Global<pc_uint8> row_at(const PcCache& plane, pc_int64 block, const ConvertPlace& place) {
  return Global<pc_uint8>(plane.data) +
         (block * plane.block_stride + place.token * plane.token_stride + place.head * plane.head_stride);
}

PC_DEVICE Global<pc_uint8> scales_at(const PcScales& plane, pc_int64 block, const ConvertPlace& place) {
  return row_at({plane.data, plane.block_stride, plane.token_stride, plane.head_stride}, block, place);
}

PC_KERNEL(128, 4)
void convert_codes(const PcConvertParams params) {
  const ConvertPlace place = convert_place(params);
  for_each_pair(params.pairs, [&](pc_int64 source, pc_int64 target) {
    ConvertRow row = place.row;
    row.elements = row_at(params.source.codes, source, place);
    row.own_scales = scales_at(params.source.scales, source, place);
    row.codes = row_at(params.target.codes, target, place);
    row.scales = scales_at(params.target.scales, target, place);
    row.own_scale = {1.0f, 0, 0};
    if (pc_has_row_scale(row.own_format)) {
      row.own_scale = row_scale(row.own_format, row.own_scales.template as<pc_uint32>().load(0));
    }
    if (params.target.format == PC_PLAIN) {
      write_numbers(row, params.target.type);
    } else {
      write_row(row, params.target.format, params.is_4over6 != 0);
    }
  });
}

}  // namespace pagecore
