// Numbers of codes of 2 or 4 bits with a scale and a least number for each group: the inverse of affine.cu.
//
//   task  eight consecutive entries of a lane, which are in one word; a thread has one task
//
// Tasks are numbered so that adjacent threads write adjacent numbers: first along entries if these are adjacent in
// memory (PC_AFFINE_CHUNKS), otherwise first along lanes (PC_AFFINE_LANES). Scales are loaded again where a group
// begins. The y axis of the grid has pairs of blocks, the z axis keys and values. Sums are fused, and so as exact as
// those of the host in double.
#include "cuda_src/abi/affine.h"
#include "cuda_src/codecs/convert_pairs.cuh"
#include "cuda_src/device/units.cuh"

namespace pagecore {

constexpr int kEntries = 8;

// Addresses of a task in block 0.
struct RestoreTask {
  pc_int64 numbers;
  pc_int64 words;
  pc_int64 scales;
  int shift;  // of the first code in its word
  int left;   // entries until the next group
};

PC_DEVICE RestoreTask restore_task(const PcAffinePlane& plane, int number) {
  const int outer = divide(number, plane.inner), matrix = divide(outer, plane.middle);
  const int inner = number - outer * plane.inner.divisor, middle = outer - matrix * plane.middle.divisor;
  const bool chunks = plane.tiling == PC_AFFINE_CHUNKS;
  const pc_int64 lane = chunks ? middle : inner;
  const int entry = (chunks ? inner : middle) * kEntries, codes_in_word = 32 / plane.bits, group = entry / plane.group;
  RestoreTask task;
  task.numbers = matrix * plane.numbers_matrix_stride + entry * plane.entry_stride + lane * plane.lane_stride;
  task.words =
      matrix * plane.words_matrix_stride + entry / codes_in_word * plane.word_stride + lane * plane.word_lane_stride;
  task.scales = matrix * plane.scales_matrix_stride + group * plane.group_stride + lane * plane.scale_lane_stride;
  task.shift = entry % codes_in_word * plane.bits;
  task.left = (group + 1) * plane.group - entry;
  return task;
}

PC_DEVICE float load_number(PcFloat type, const Global<pc_uint8>& source) {
  if (type == PC_FLOAT32) return source.as<float>().load(0);
  if (type == PC_FLOAT16) return pc_to_float(source.as<pc_half>().load(0));
  return pc_to_float(source.as<pc_bfloat16>().load(0));
}

template <typename T>
PC_DEVICE void store_entries(const PcAffinePlane& plane, const Global<pc_uint8>& target, const float (&x)[kEntries]) {
  if (plane.in_vectors != 0) return store_unit<T, kEntries>(target.as<T>(), 0, unit_of<T>(x));
  PC_UNROLL
  for (int i = 0; i < kEntries; ++i) {
    const float one[1] = {x[i]};
    store_unit<T, 1>((target + i * plane.entry_stride).as<T>(), 0, unit_of<T>(one));
  }
}

PC_KERNEL(128, 4)
void dequantize_affine(const PcAffineParams params) {
  const PcAffinePlane& plane = params.planes[pc_block_z()];
  const pc_int64 number = static_cast<pc_int64>(pc_block_x()) * pc_num_threads() + pc_thread();
  if (number >= plane.num_tasks) return;  // fault: restored_tasks_past_the_last
  const RestoreTask task = restore_task(plane, static_cast<int>(number));
  const pc_uint32 largest_code = plane.bits == 2 ? 3u : 15u;
  for_each_pair(params.pairs, [&](pc_int64 source, pc_int64 target) {
    const Global<pc_uint8> words = Global<pc_uint8>(plane.words) + (source * plane.words_block_stride + task.words);
    Global<pc_uint8> scales = Global<pc_uint8>(plane.scales) + (source * plane.scales_block_stride + task.scales);
    pc_uint32 codes = words.as<pc_uint32>().load(0) >> task.shift;
    float scale = load_number(plane.scale_type, scales);
    float least = load_number(plane.scale_type, scales + plane.least_offset);
    float x[kEntries];
    int left = task.left;
    PC_UNROLL
    for (int i = 0; i < kEntries; ++i) {
      if (left == 0) {
        scales = scales + plane.group_stride;
        scale = load_number(plane.scale_type, scales);
        least = load_number(plane.scale_type, scales + plane.least_offset);
        left = plane.group;  // fault: restored_groups
      }
      x[i] = pc_fma(static_cast<float>(codes & largest_code), scale, least);
      codes >>= plane.bits;
      --left;
    }
    const Global<pc_uint8> numbers =
        Global<pc_uint8>(plane.numbers) + (target * plane.numbers_block_stride + task.numbers);
    if (plane.type == PC_FLOAT32) return store_entries<float>(plane, numbers, x);
    if (plane.type == PC_FLOAT16) return store_entries<pc_half>(plane, numbers, x);
    store_entries<pc_bfloat16>(plane, numbers, x);
  });
}

}  // namespace pagecore
