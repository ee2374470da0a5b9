// Parts of the kernels of latent rows and of the indexer: chunks of 8 numbers, slots, and positions of sequences.
#pragma once

#include "cuda_src/abi/latent_rows.h"
#include "cuda_src/device/formats.cuh"
#include "cuda_src/device/units.cuh"
#include "cuda_src/device/write_slots.cuh"

namespace pagecore {

constexpr float kLargestNumber = 3.402823466e38f;

// ---- chunks of 8 numbers

template <typename T>
PC_DEVICE void load_typed_chunk(const Global<T>& row, int at, int dim, bool in_vectors, float (&x)[8]) {
  if (in_vectors && at < dim) {
    const Unit<T, 8> unit = load_unit<T, 8, false>(row, at);
    PC_UNROLL
    for (int i = 0; i < 8; ++i) x[i] = element(unit, i);
    return;
  }
  PC_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = at + i < dim ? pc_to_float(row.load(at + i)) : 0.0f;
}

// Loads the numbers of a row from `at` on; those past `dim` are 0.
PC_DEVICE void load_chunk(pc_address row, PcFloat type, int at, int dim, bool in_vectors, float (&x)[8]) {
  if (type == PC_FLOAT32) return load_typed_chunk(Global<float>(row), at, dim, in_vectors, x);
  if (type == PC_FLOAT16) return load_typed_chunk(Global<pc_half>(row), at, dim, in_vectors, x);
  load_typed_chunk(Global<pc_bfloat16>(row), at, dim, in_vectors, x);
}

// The chunk of a new row.
PC_DEVICE void load_chunk(const PcNewRows& rows, pc_int64 token, int at, float (&x)[8]) {
  const int size = rows.type == PC_FLOAT32 ? 4 : 2;
  const pc_address row = rows.data + static_cast<pc_address>(token * rows.token_stride * size);
  load_chunk(row, rows.type, at, rows.dim, rows.in_vectors != 0, x);
}

// Stores the e4m3 codes of 8 numbers times `inverse`; those past `dim` are not stored.
PC_DEVICE void store_e4m3(const Global<pc_uint8>& row, int at, int dim, bool in_vectors, const int (&code)[8]) {
  if (at >= dim) return;
  if (in_vectors) {
    pc_uint64 bytes = 0;
    PC_UNROLL
    for (int i = 0; i < 8; ++i) bytes |= static_cast<pc_uint64>(code[i]) << 8 * i;
    (row + at).as<pc_uint64>().store(0, bytes);
    return;
  }
  PC_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (at + i < dim) row.store(at + i, static_cast<pc_uint8>(code[i]));
  }
}

// Loads 8 e4m3 codes; those past `dim` are 0.
PC_DEVICE pc_uint64 load_e4m3(const Global<pc_uint8>& row, int at, int dim, bool in_vectors) {
  if (at >= dim) return 0;
  if (in_vectors) return (row + at).as<pc_uint64>().load(0);
  pc_uint64 bytes = 0;
  PC_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (at + i < dim) bytes |= static_cast<pc_uint64>(row.load(at + i)) << 8 * i;
  }
  return bytes;
}

PC_DEVICE void floats_of_e4m3(pc_uint64 codes, float (&x)[8]) {
  PC_UNROLL
  for (int i = 0; i < 4; ++i) {
    const pc_uint32 pair = halves_of_e4m3(static_cast<pc_uint32>(codes >> 16 * i) & 0xffffu);
    x[2 * i] = low_half(pair);
    x[2 * i + 1] = high_half(pair);
  }
}

// The greatest magnitude of some numbers, NaN ignored.
PC_DEVICE float largest_of(const float (&x)[8]) {
  float largest = 0.0f;
  PC_UNROLL
  for (int i = 0; i < 8; ++i) largest = pc_max(largest, magnitude_of(x[i]));
  return largest;
}

// The greatest over `lanes` adjacent lanes, a power of two; infinity becomes the largest number.
PC_DEVICE float largest_of_lanes(float largest, int lanes) {
  for (int mask = 1; mask < lanes; mask *= 2) largest = pc_max(largest, pc_shuffle_xor(largest, mask));
  return -pc_max(-largest, -kLargestNumber);
}

// ---- slots

struct SlotOffset {
  pc_int64 block;
  pc_int64 offset;
  bool is_written;
};

// The place of a new token.
PC_DEVICE SlotOffset slot_of_token(const PcSlots& slots, pc_int64 token) {
  const pc_int64 slot = load_index(slots.slots, token);
  // As an unsigned number a negative slot is past the end.
  if (static_cast<pc_uint64>(slot) >= static_cast<pc_uint64>(slots.num_slots)) return {0, 0, false};
  const SlotPosition at = position_of(slot, slots.block_size, slots.block_shift);
  return {at.block, at.offset, true};
}

// ---- sequences

// A query token of a sequence.
struct QueryOfSequence {
  pc_int64 row;  // of the block table; -1 if the token has no sequence
  int sequence;
  int later;  // query tokens of the sequence after this one
};

// Finds the sequence of a query token: the last one that begins at or before it.
PC_DEVICE QueryOfSequence sequence_of(const PcSequenceBatch& batch, int token) {
  int low = 0, high = batch.num_sequences;
  int later = 0;
  if (batch.cu_query_lens.data == 0) {
    low = token;
  } else {
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (load_index(batch.cu_query_lens, middle) <= token) {
        low = middle;
      } else {
        high = middle;
      }
    }
    if (batch.num_sequences > 0) later = static_cast<int>(load_index(batch.cu_query_lens, low + 1)) - 1 - token;
  }
  if (low >= batch.num_sequences || later < 0) return {-1, 0, 0};  // fault: index_tokens_past_the_end
  const pc_int64 row = batch.rows.data != 0 ? load_index(batch.rows, low) : low;
  if (row < 0 || row >= batch.table.num_rows) return {-1, 0, 0};
  return {row, low, later};
}

// The length of a sequence, clamped to the capacity of its row of the table.
PC_DEVICE int length_of(const PcSequenceBatch& batch, int sequence) {
  const pc_int64 room = static_cast<pc_int64>(batch.table.width) * batch.block_size.divisor;
  const pc_int64 most = room < 0x7fffffff ? room : 0x7fffffff;
  return clamp(load_index(batch.seq_lens, sequence), 0, static_cast<int>(most));
}

// An entry of the block table.
PC_DEVICE pc_int64 block_entry(const PcSequenceBatch& batch, pc_int64 row, int at) {
  const pc_int64 i = row * batch.table.row_stride + at;
  return batch.table.wide ? Global<pc_int64>(batch.table.data).load(i) : Global<int>(batch.table.data).load(i);
}

// An entry, or `other` if it is below `lowest` or past the cache.
PC_DEVICE pc_int64 block_in_cache(const PcSequenceBatch& batch, pc_int64 row, int at, int lowest, int other) {
  const pc_int64 block = block_entry(batch, row, at);
  return block < lowest || block >= batch.num_blocks ? other : block;  // fault: latent_blocks_outside
}

}  // namespace pagecore
