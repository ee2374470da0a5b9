// Quantisation of whole blocks to codes of 2 or 4 bits, with a scale and a least number for each group (KIVI).
//
//   keys, PC_AFFINE_QUADS            values, PC_AFFINE_CHUNKS
//
//              channels                         channels of a token
//            | 4 | 4 | 4 | ...                | 8 | 8 | 8 | 8 | 8 | ...
//   tokens   |   |   |   |                    |--- group -----|---
//   of a     | v | v | v |                      a chunk of a lane; lanes exchange the range of their group
//   stretch  a thread: four channels
//
// A stretch is the least number of entries after which both groups and words end, 16 to a whole block, so that threads
// share nothing. Tasks are numbered over the matrices of a block along the x axis of the grid; the y axis has the pairs
// of blocks, the z axis keys and values: a call is one launch for up to 128 pairs from the host, or any number in
// device memory. In flight: a thread has four entries of its lanes, or a chunk of 8. Numbers are read twice, the second
// time from the cache of the multiprocessor; everything else moves once. Arithmetic is that of the host
// (ops/cpu/codecs/affine_codes.cpp), so that words and scales have the same bits.
#include "cuda_src/abi/affine.h"
#include "cuda_src/codecs/convert_pairs.cuh"
#include "cuda_src/latent/rows/numbers.cuh"

namespace pagecore {

constexpr int kEntriesInFlight = 4;

// ---- scales

// The range of the numbers of a group. NaN is ignored but for `has_nan`.
struct GroupRange {
  float low;
  float high;
  int has_nan;

  PC_MEMBER void clear() {
    low = kLargestNumber;
    high = -kLargestNumber;
    has_nan = 0;
  }
  PC_MEMBER void add(float x) {
    low = -pc_max(-low, -x);
    high = pc_max(high, x);
    has_nan |= x != x ? 1 : 0;
  }
  // Joins the ranges of `lanes` adjacent lanes, a power of two.
  PC_MEMBER void join(int lanes) {
    for (int mask = 1; mask < lanes; mask *= 2) {  // fault: affine_lanes
      low = -pc_max(-low, -pc_shuffle_xor(low, mask));
      high = pc_max(high, pc_shuffle_xor(high, mask));
      has_nan |= pc_shuffle_xor(has_nan, mask);
    }
  }
};

// The bits of a number in a dtype, in which NaN has the sign and the payload that the host stores.
PC_DEVICE pc_uint32 bits_in(PcFloat type, float x) {
  if (type == PC_FLOAT32) return pc_float_to_bits(x);
  if (x != x) return type == PC_FLOAT16 ? 0x7e00u : 0x7fc0u;
  return type == PC_FLOAT16 ? pc_from_float<pc_half>(x).bits : pc_from_float<pc_bfloat16>(x).bits;
}

PC_DEVICE float number_in(PcFloat type, pc_uint32 bits) {
  if (type == PC_FLOAT32) return pc_bits_to_float(bits);
  if (type == PC_FLOAT16) return pc_to_float(pc_half{static_cast<pc_uint16>(bits)});
  return pc_to_float(pc_bfloat16{static_cast<pc_uint16>(bits)});
}

PC_DEVICE float largest_in(PcFloat type) {
  return type == PC_FLOAT32 ? kLargestNumber : type == PC_FLOAT16 ? 65504.0f : 3.3895314e38f;
}

// Infinities become the largest number of the dtype of the scales.
PC_DEVICE float finite_in(PcFloat type, float x) {
  const float most = largest_in(type), below = x > most ? most : x;
  return below < -most ? -most : below;
}

// The scale and the least number of a group, as they are stored.
struct GroupScale {
  pc_uint32 scale_bits;
  pc_uint32 least_bits;
  float least;
  float divisor;  // infinity for a scale of 0 or NaN, which makes all codes 0

  PC_MEMBER void set(const GroupRange& range, PcFloat type, float largest_code) {
    // A sum with 0 has no sign if it is 0.
    const float width = -pc_max(-(range.high - range.low), -kLargestNumber) + 0.0f;
    const bool is_nan = range.has_nan != 0;
    scale_bits = bits_in(type, is_nan ? pc_bits_to_float(0x7fc00000u) : width / largest_code);
    least_bits = bits_in(type, is_nan ? 0.0f : range.low + 0.0f);
    const float scale = number_in(type, scale_bits);
    least = number_in(type, least_bits);
    divisor = scale > 0.0f ? scale : pc_infinity();  // fault: affine_divisor
  }

  // The code of a number, to nearest even; 0 for NaN.
  PC_MEMBER pc_uint32 code_of(float x, float largest_code) const {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: its last place is 1
    float code = (x - least) / divisor;
    code = code > 0.0f ? code : 0.0f;
    code = code < largest_code ? code : largest_code;
    return pc_float_to_bits(code + kMagic) - pc_float_to_bits(kMagic);
  }
};

// ---- tasks

// The part of a block that a thread has: addresses in block 0.
struct AffineTask {
  pc_int64 numbers;  // bytes, here and below
  pc_int64 words;
  pc_int64 scales;
  bool exists;
};

PC_DEVICE AffineTask affine_task(const PcAffinePlane& plane) {
  const int number =
      static_cast<int>((static_cast<pc_int64>(pc_block_x()) * pc_num_threads() + pc_thread()) >> plane.lanes_shift);
  AffineTask task;
  // Lanes of other tasks take part in the exchange of ranges.
  task.exists = number < plane.num_tasks;  // fault: affine_tasks_past_the_last
  const int own = task.exists ? number : 0, outer = divide(own, plane.inner), matrix = divide(outer, plane.middle);
  const int inner = own - outer * plane.inner.divisor, middle = outer - matrix * plane.middle.divisor;
  const bool chunks = plane.tiling == PC_AFFINE_CHUNKS;
  const pc_int64 lane = chunks ? middle : inner * (plane.tiling == PC_AFFINE_QUADS ? 4 : 1);
  const pc_int64 entry = static_cast<pc_int64>(chunks ? inner : middle) * (chunks ? plane.group : plane.stretch);
  const pc_int64 word = entry / (32 / plane.bits), group = chunks ? inner : entry / plane.group;
  task.numbers = matrix * plane.numbers_matrix_stride + entry * plane.entry_stride + lane * plane.lane_stride;
  task.words = matrix * plane.words_matrix_stride + lane * plane.word_lane_stride;
  // The first word of a group may begin before the group.
  task.words += chunks ? entry * plane.bits / 8 : word * plane.word_stride;
  task.scales = matrix * plane.scales_matrix_stride + group * plane.group_stride + lane * plane.scale_lane_stride;
  return task;
}

// ---- lanes

// Loads adjacent numbers of up to kEntriesInFlight entries, finite or NaN; those of other entries are 0.
template <typename T, int Count>
PC_DEVICE void load_entries(const PcAffinePlane& plane, const Global<pc_uint8>& first, int count,
                            float (&x)[kEntriesInFlight][Count]) {
  Unit<T, Count> units[kEntriesInFlight];
  PC_UNROLL
  for (int i = 0; i < kEntriesInFlight; ++i) {
    units[i] = {};
    if (i < count) units[i] = load_unit<T, Count, false>((first + i * plane.entry_stride).as<T>(), 0);
  }
  PC_UNROLL
  for (int i = 0; i < kEntriesInFlight; ++i) {
    PC_UNROLL
    for (int k = 0; k < Count; ++k) x[i][k] = finite_in(plane.scale_type, element(units[i], k));
  }
}

template <int Count>
PC_DEVICE void load_entries(const PcAffinePlane& plane, const Global<pc_uint8>& first, int count,
                            float (&x)[kEntriesInFlight][Count]) {
  if (plane.type == PC_FLOAT32) return load_entries<float, Count>(plane, first, count, x);
  if (plane.type == PC_FLOAT16) return load_entries<pc_half, Count>(plane, first, count, x);
  load_entries<pc_bfloat16, Count>(plane, first, count, x);
}

// Stores words, or the numbers of a dtype by their bits, of adjacent lanes.
template <int Count>
PC_DEVICE void store_lanes(const Global<pc_uint8>& target, bool words, const pc_uint32 (&bits)[Count]) {
  if constexpr (Count == 4) {
    if (words) return target.store_vector(0, {{bits[0], bits[1], bits[2], bits[3]}});
    const pc_uint64 low = bits[0] | bits[1] << 16, high = bits[2] | bits[3] << 16;
    target.as<pc_uint64>().store(0, low | high << 32);
  } else {
    if (words) return target.as<pc_uint32>().store(0, bits[0]);
    target.as<pc_uint16>().store(0, static_cast<pc_uint16>(bits[0]));
  }
}

template <int Count>
PC_DEVICE void store_scales(const PcAffinePlane& plane, const Global<pc_uint8>& target,
                            const GroupScale (&scales)[Count]) {
  pc_uint32 scale[Count], least[Count];
  PC_UNROLL
  for (int k = 0; k < Count; ++k) {
    scale[k] = scales[k].scale_bits;
    least[k] = scales[k].least_bits;
  }
  store_lanes<Count>(target, plane.scale_type == PC_FLOAT32, scale);
  store_lanes<Count>(target + plane.least_offset, plane.scale_type == PC_FLOAT32, least);
}

// The scales of a group of the thread's lanes.
template <int Count>
PC_DEVICE void find_scales(const PcAffinePlane& plane, const Global<pc_uint8>& numbers, float largest_code,
                           GroupScale (&scales)[Count]) {
  GroupRange ranges[Count];
  PC_UNROLL
  for (int k = 0; k < Count; ++k) ranges[k].clear();
  PC_NO_UNROLL
  for (int first = 0; first < plane.group; first += kEntriesInFlight) {
    float x[kEntriesInFlight][Count];
    load_entries<Count>(plane, numbers + first * plane.entry_stride, plane.group - first, x);
    PC_UNROLL
    for (int i = 0; i < kEntriesInFlight; ++i) {
      if (first + i >= plane.group) break;  // fault: affine_entries_of_other_groups
      PC_UNROLL
      for (int k = 0; k < Count; ++k) ranges[k].add(x[i][k]);
    }
  }
  PC_UNROLL
  for (int k = 0; k < Count; ++k) scales[k].set(ranges[k], plane.scale_type, largest_code);
}

// A stretch of `Count` adjacent lanes.
template <int Count>
PC_DEVICE void quantize_lanes(const PcAffinePlane& plane, const Global<pc_uint8>& numbers, Global<pc_uint8> words,
                              Global<pc_uint8> stored) {
  const float largest_code = plane.bits == 2 ? 3.0f : 15.0f;
  pc_uint32 held[Count] = {};  // codes of a word
  int shift = 0;
  PC_NO_UNROLL
  for (int begin = 0; begin < plane.stretch; begin += plane.group) {
    GroupScale scales[Count];
    const Global<pc_uint8> group = numbers + begin * plane.entry_stride;
    find_scales<Count>(plane, group, largest_code, scales);
    store_scales<Count>(plane, stored, scales);
    stored = stored + plane.group_stride;
    PC_NO_UNROLL
    for (int first = 0; first < plane.group; first += kEntriesInFlight) {
      float x[kEntriesInFlight][Count];
      load_entries<Count>(plane, group + first * plane.entry_stride, plane.group - first, x);
      PC_UNROLL
      for (int i = 0; i < kEntriesInFlight; ++i) {
        if (first + i >= plane.group) break;
        PC_UNROLL
        for (int k = 0; k < Count; ++k) held[k] |= scales[k].code_of(x[i][k], largest_code) << shift;
        shift += plane.bits;
        if (shift < 32) continue;
        store_lanes<Count>(words, true, held);
        words = words + plane.word_stride;
        shift = 0;
        PC_UNROLL
        for (int k = 0; k < Count; ++k) held[k] = 0;  // fault: affine_codes_of_the_word_before
      }
    }
  }
}

// ---- chunks

// A group of adjacent entries, shared by lanes of the warp. All lanes of the warp call it.
PC_DEVICE void quantize_chunks(const PcAffinePlane& plane, bool exists, const Global<pc_uint8>& numbers,
                               const Global<pc_uint8>& words, const Global<pc_uint8>& stored) {
  const float largest_code = plane.bits == 2 ? 3.0f : 15.0f;
  const int lanes = 1 << plane.lanes_shift, lane = pc_lane() & (lanes - 1);
  const int end = exists ? plane.group : 0;
  GroupRange range;
  range.clear();
  PC_NO_UNROLL
  for (int at = 8 * lane; at < end; at += 8 * lanes) {
    float x[8];
    load_chunk(numbers.address(), plane.type, at, plane.group, plane.in_vectors != 0, x);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) range.add(finite_in(plane.scale_type, x[i]));
  }
  range.join(lanes);
  GroupScale scales[1];
  scales[0].set(range, plane.scale_type, largest_code);
  if (exists && lane == 0) store_scales<1>(plane, stored, scales);
  PC_NO_UNROLL
  for (int at = 8 * lane; at < end; at += 8 * lanes) {
    float x[8];
    pc_uint32 codes = 0;
    load_chunk(numbers.address(), plane.type, at, plane.group, plane.in_vectors != 0, x);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      codes |= scales[0].code_of(finite_in(plane.scale_type, x[i]), largest_code) << i * plane.bits;
    }
    if (plane.bits == 2) {
      words.as<pc_uint16>().store(at / 8, static_cast<pc_uint16>(codes));
    } else {
      words.as<pc_uint32>().store(at / 8, codes);
    }
  }
}

PC_KERNEL(128, 4)
void quantize_affine(const PcAffineParams params) {
  const PcAffinePlane& plane = params.planes[pc_block_z()];
  const AffineTask task = affine_task(plane);
  for_each_pair(params.pairs, [&](pc_int64 source, pc_int64 target) {
    const Global<pc_uint8> numbers =
        Global<pc_uint8>(plane.numbers) + (source * plane.numbers_block_stride + task.numbers);
    const Global<pc_uint8> words = Global<pc_uint8>(plane.words) + (target * plane.words_block_stride + task.words);
    const Global<pc_uint8> scales = Global<pc_uint8>(plane.scales) + (target * plane.scales_block_stride + task.scales);
    if (plane.tiling == PC_AFFINE_CHUNKS) return quantize_chunks(plane, task.exists, numbers, words, scales);
    if (!task.exists) return;
    if (plane.tiling == PC_AFFINE_QUADS) return quantize_lanes<4>(plane, numbers, words, scales);
    quantize_lanes<1>(plane, numbers, words, scales);
  });
}

}  // namespace pagecore
