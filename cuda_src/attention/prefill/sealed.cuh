// Sealed blocks in prefill.cu: a tile whose first rows are in sealed blocks, and the others in the caches.
//
//   words, scales   of the sealed rows      copied by cp.async, of keys or of values
//     |
//     | all threads unpack them
//     v
//   keys            [tokens, kDim] of T     rows of the caches are copied here by cp.async
//   values          [tokens, kValueDim] of T
//
// Sealed blocks, and groups of their keys, are whole quarters of 16 tokens, so that a quarter is in one block and its
// keys are in one group. A number is least + code * scale in float32, rounded to T; the tile is then multiplied as if
// it came from a 16-bit cache (sealed_rows.cuh).
//
// In flight: as in PrefillFeed, the values while keys are multiplied, and the next keys while values are multiplied.
// While a tile is unpacked, this CTA has no copies in flight: keys and values share the memory of the words, so that
// two CTAs of 128 values or fewer fit an A100. There is no second CTA above 128 values and with Full options, whose
// CTAs have 8 warps.
#pragma once

#include "cuda_src/attention/inputs/sealed.cuh"
#include "cuda_src/attention/prefill/sealed_rows.cuh"

namespace pagecore {

// The copies of tiles of sealed blocks and of 16-bit caches, and the unpacking of the former. See PrefillFeed.
template <typename Tile>
class SealedFeed : public PrefillSource<Tile> {
  using Base = PrefillSource<Tile>;
  using T = typename Tile::Element;
  using Tables = BlockTables<true>;
  using Sealed = SealedRows<Tile>;
  using Keys = typename Tile::Keys;

 public:
  PC_MEMBER explicit SealedFeed(const Shared<pc_uint8>& shared)
      : Base(shared), slots_((shared + Tile::kShape.slots_begin()).template as<Slot>()) {}

  PC_MEMBER void start(const PcAttentionParams& p, const PrefillItem& item, int i) const {
    Base::start(p, item, i);
    if (pc_thread() != 0) return;
    Tables tables;
    tables.open(p, item.sequence);
    stored_tables().store(0, tables);
  }

  PC_MEMBER void begin(const PcAttentionParams& p, const KeyRange& keys, int token) {
    look_up(p, keys, token);
    store_slots(0);
    store_slots(Tile::kTokens);
    pc_sync_block();
    copy_keys(p, keys, token);
    look_up(p, keys, token + Tile::kTokens);
  }

  PC_MEMBER void open_keys(const PcAttentionParams& p, const KeyRange& keys, int token) const {
    pc_wait_copies<0>();
    pc_sync_block();
    const int rows = count_sealed(token);
    if (rows != 0) {
      sealed().unpack_keys(sealed_params(p).key, rows);
      pc_sync_block();  // fault: prefill_sealed_barrier_after_keys
    }
    copy_values(p, keys, token);
    store_slots(0);
  }

  PC_MEMBER void open_values(const PcAttentionParams& p, const KeyRange& keys, int token) {
    pc_wait_copies<0>();  // fault: prefill_sealed_wait
    pc_sync_block();
    const int rows = count_sealed(token);
    if (rows != 0) {
      sealed().unpack_values(sealed_params(p).value, p.value_dim, rows);
      pc_sync_block();  // fault: prefill_sealed_barrier_after_values
    }
    if (token + Tile::kTokens < keys.end) copy_keys(p, keys, token + Tile::kTokens);
    store_slots(Tile::kTokens);
    look_up(p, keys, token + 2 * Tile::kTokens);
  }

 private:
  PC_MEMBER Shared<Tables> stored_tables() const {
    return (this->shared_ + Tile::kShape.tables_begin()).template as<Tables>();
  }
  PC_MEMBER Sealed sealed() const { return Sealed(this->shared_); }

  // Rows of the tile at `token` whose tokens are in sealed blocks: whole quarters.
  PC_MEMBER int count_sealed(int token) const {
    return clamp(stored_tables().load(0).length() - token, 0, Tile::kTokens);
  }

  // Returns true if the item has keys of the quarter of token j. Its tokens are then in one block of the sequence, or,
  // in the caches, in the blocks that its tokens are in.
  PC_MEMBER static bool has_quarter(const KeyRange& keys, int j) {
    return keys.begin < keys.end && keys.overlaps(j / 16 * 16, 16);
  }

  // ---- slots

  PC_MEMBER void look_up(const PcAttentionParams& p, const KeyRange& keys, int token) {
    const int own = token + pc_thread();
    this->slot_ = {0, 0};
    if (pc_thread() >= Tile::kTokens) return;
    const Tables tables = stored_tables().load(0);
    const bool exists = own < tables.length() ? has_quarter(keys, own) : keys.has(own);  // fault: prefill_sealed_slots
    if (!exists) return;
    const SealedSlot slot = tables.begin(p, this->span_.load(0).table_row, own).get(p);
    this->slot_ = {slot.block, slot.offset};
  }

  PC_MEMBER void store_slots(int first) const {
    if (pc_thread() < Tile::kTokens) slots_.store(first + pc_thread(), this->slot_);
  }

  // ---- copies

  PC_MEMBER void copy_keys(const PcAttentionParams& p, const KeyRange& keys, int token) const {
    using Row = typename Tile::KeyRow;
    const int rows = count_sealed(token);
    if (rows != 0) copy_packed_keys(sealed_params(p).key, p.head_dim, keys, token, rows);
    if (rows != Tile::kTokens) copy_rows<Row>(p.key, Tile::kShape.keys_begin(), p.head_dim, keys, token, 0, rows);
    pc_commit_copies();
  }
  PC_MEMBER void copy_values(const PcAttentionParams& p, const KeyRange& keys, int token) const {
    using Row = typename Tile::ValueRow;
    const int rows = count_sealed(token), begin = Tile::kShape.values_begin();
    if (rows != 0) copy_packed_values(sealed_params(p).value, p.value_dim, keys, token, rows);
    if (rows != Tile::kTokens) copy_rows<Row>(p.value, begin, p.value_dim, keys, token, Tile::kTokens, rows);
    pc_commit_copies();
  }

  // Starts to copy the rows of a cache, but for the first `sealed` rows of the tile. As in PrefillFeed, a thread whose
  // chunk lies past the dims of the call writes zeros.
  template <typename Row>
  PC_MEMBER void copy_rows(const PcCache& cache, int target, int dim, const KeyRange& keys, int token, int first_slot,
                           int sealed) const {
    const int thread = pc_opaque(pc_thread());
    const int first_row = thread / Tile::kLanes, chunk = thread % Tile::kLanes;
    const int head = pc_opaque(pc_block_y());
    const Global<T> column = Global<T>(cache.data) + (head * cache.head_stride + chunk * 8);
    const SharedAddress first = this->shared_.address(target + Row::at(first_row, chunk));
    const KeyRange own_keys = keys.only_if(chunk * 8 < dim);  // fault: prefill_sealed_rows_past_dims
    if (chunk >= Row::kChunks) return;
    PC_UNROLL
    for (int i = 0; i < Tile::kTokens; i += Tile::kCopyRows) {
      const int row = first_row + i;
      if (row < sealed) continue;  // fault: prefill_sealed_rows
      const pc_int64 from = slot_offset(cache, slots_.load(first_slot + row));
      pc_copy_async(Row::below(first, i), column, from, own_keys.has(token + row));
    }
  }

  // Starts to copy words and scales of keys. A quarter without keys of the item becomes zeros.
  PC_MEMBER void copy_packed_keys(const PcSealedPlane& key, int dim, const KeyRange& keys, int token, int rows) const {
    const int head = pc_opaque(pc_block_y());
    const Global<pc_uint8> words_of_head = Global<pc_uint8>(key.words) + head * key.head_stride;
    const Global<pc_uint8> scales_of_head = Global<pc_uint8>(key.scales) + head * key.scales_head_stride;
    PC_NO_UNROLL
    for (int at = pc_opaque(pc_thread()); at < rows / 16 * Keys::kUnits; at += Tile::kThreads) {
      const int quarter = at / Keys::kUnits, unit = at % Keys::kUnits;
      if (!Keys::has_unit(key, unit)) continue;
      const Slot slot = slots_.load(16 * quarter);
      const SharedAddress to = sealed().packed_keys().address(16 * at);
      const bool exists = has_quarter(keys, token + 16 * quarter);  // fault: prefill_sealed_quarters
      Keys::copy_unit(key, dim, words_of_head, scales_of_head, slot.block, slot.offset, unit, to, exists);
    }
  }

  // Starts to copy words and scales of values. Tokens that the item does not have become zeros.
  PC_MEMBER void copy_packed_values(const PcSealedPlane& value, int dim, const KeyRange& keys, int token,
                                    int rows) const {
    constexpr int kUnits = Tile::kPitch / 16, kWords = Tile::kPitch / 4;  // of a row
    const Shared<Slot> slots = slots_ + Tile::kTokens;
    const Shared<pc_uint8> words = sealed().packed_values(), scales = words + Tile::kScalesBegin;
    const int head = pc_opaque(pc_block_y());
    const Global<pc_uint8> words_of_head = Global<pc_uint8>(value.words) + head * value.head_stride;
    const Global<pc_uint8> scales_of_head = Global<pc_uint8>(value.scales) + head * value.scales_head_stride;
    const SealedValueRow shape(value, dim);
    PC_NO_UNROLL
    for (int at = pc_opaque(pc_thread()); shape.is_whole && at < rows * kUnits; at += Tile::kThreads) {
      const int row = at / kUnits, byte = at % kUnits * 16;
      if (byte >= 4 * shape.num_words) continue;
      const Slot slot = slots.load(row);
      const pc_int64 from = slot.block * value.block_stride + slot.offset * value.row_stride + byte;
      pc_copy_async(words.address(row * Tile::kPitch + byte), words_of_head, from, keys.has(token + row));
    }
    PC_NO_UNROLL
    for (int at = pc_opaque(pc_thread()); at < rows * kWords; at += Tile::kThreads) {
      const int row = at / kWords, byte = at % kWords * 4;
      const Slot slot = slots.load(row);
      if (!shape.is_whole && byte < 4 * shape.num_words) {
        const pc_int64 from = slot.block * value.block_stride + slot.offset * value.row_stride + byte;
        pc_copy_word_async(words.address(4 * at), words_of_head, from, keys.has(token + row));
      }
      if (byte >= 4 * shape.num_scale_words) continue;
      const pc_int64 from = slot.block * value.scales_block_stride + slot.offset * value.scales_row_stride + byte;
      const bool exists = keys.has(token + row);  // fault: prefill_sealed_scales_of_other_items
      pc_copy_word_async(scales.address(4 * at), scales_of_head, from, exists);
    }
  }

  Shared<Slot> slots_;  // of keys, and of values; keys are one tile ahead
};

}  // namespace pagecore
