// Sealed blocks in prefill.cu: a tile of 64 tokens whose first rows are in sealed blocks, and the others in the caches.
//
//   words, scales   of the sealed rows      copied by cp.async, of keys or of values
//     |
//     | all threads unpack them
//     v
//   keys, values    [tokens, kDim] of T     rows of the caches are copied here by cp.async
//
// Sealed blocks, and groups of their keys, are whole quarters of a tile, 16 tokens, so that a quarter is in one block
// and its keys are in one group. A number is least + code * scale in float32, rounded to T; the tile is then multiplied
// as if it came from a 16-bit cache.
//
//   words and scales of keys     [quarters][1 or 2][kDim] words        a word has 16 or 8 tokens of a channel
//                                [quarters][2][kDim], 4 bytes each     scale and least number of up to 4 bytes
//   words and scales of values   [tokens][kDim * kBits / 32] words     a word has 16 or 8 channels
//                                [tokens][kDim / 16][2], 4 bytes each  groups have 16 channels or more
//
// In flight: as in PrefillFeed, the values while keys are multiplied, and the next keys while values are multiplied.
// While a tile is unpacked, only the other CTA has copies in flight: keys and values share the memory of the words, so
// that two CTAs fit an A100.
#pragma once

#include "cuda_src/attention/inputs/sealed.cuh"
#include "cuda_src/attention/prefill/feed.cuh"
#include "cuda_src/attention/tiles/sealed_numbers.cuh"

namespace pagecore {

template <typename T, int kBits, int kDim, typename ScoreOptions>
struct PrefillSealedTile : PrefillTile<T, kDim, ScoreOptions, kDim, 0, kBits> {
  using Base = PrefillTile<T, kDim, ScoreOptions, kDim, 0, kBits>;
  static constexpr int kNumBits = kBits;
  static constexpr int kInWord = 32 / kBits;                             // codes
  static constexpr int kWordRows = 16 / kInWord;                         // of a quarter of keys
  static constexpr int kChunks = kDim / 8;                               // of an unpacked row
  static constexpr int kOwn = Base::kTokens * kChunks / Base::kThreads;  // chunks that a thread unpacks
  static constexpr int kScalesBegin = Base::kShape.sealed_word_bytes();
  static constexpr int kValueBytes = kDim * kBits / 8;  // of the words of a row
  static constexpr int kScalePitch = kDim / 16 * 8;     // bytes, of the scales of a row of values

  static_assert(kChunks == Base::KeyRow::kChunks, "a row has no padding");
  static_assert(Base::kTokens % 16 == 0 && kInWord % kOwn == 0, "a thread has keys of one word of each channel");
  static_assert(kValueBytes % 16 == 0, "rows are whole units of cp.async");
};

// The copies of tiles of sealed blocks and of 16-bit caches, and the unpacking of the former. See PrefillFeed.
template <typename Tile>
class SealedFeed : public PrefillSource<Tile> {
  using Base = PrefillSource<Tile>;
  using T = typename Tile::Element;
  using Tables = BlockTables<true>;

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
    const int rows = sealed_rows(token);
    if (rows != 0) {
      unpack_keys(sealed_params(p).key.scale_type, rows);
      pc_sync_block();  // fault: prefill_sealed_barrier_after_keys
    }
    copy_values(p, keys, token);
    store_slots(0);
  }

  PC_MEMBER void open_values(const PcAttentionParams& p, const KeyRange& keys, int token) {
    pc_wait_copies<0>();  // fault: prefill_sealed_wait
    pc_sync_block();
    const int rows = sealed_rows(token);
    if (rows != 0) {
      unpack_values(sealed_params(p).value, rows);
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
  PC_MEMBER Shared<pc_uint8> words() const { return this->shared_ + Tile::kShape.sealed_begin(); }
  PC_MEMBER Shared<pc_uint8> scales() const { return words() + Tile::kScalesBegin; }

  // Rows of the tile at `token` whose tokens are in sealed blocks: whole quarters.
  PC_MEMBER int sealed_rows(int token) const {
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
    const int rows = sealed_rows(token);
    if (rows != 0) copy_key_words(sealed_params(p).key, keys, token, rows);
    if (rows != Tile::kTokens) copy_rows(p.key, Tile::kShape.keys_begin(), keys, token, 0, rows);
    pc_commit_copies();
  }
  PC_MEMBER void copy_values(const PcAttentionParams& p, const KeyRange& keys, int token) const {
    const int rows = sealed_rows(token);
    if (rows != 0) copy_value_words(sealed_params(p).value, keys, token, rows);
    if (rows != Tile::kTokens) copy_rows(p.value, Tile::kShape.values_begin(), keys, token, Tile::kTokens, rows);
    pc_commit_copies();
  }

  // Starts to copy the rows of a cache, but for the first `sealed` rows of the tile.
  PC_MEMBER void copy_rows(const PcCache& cache, int target, const KeyRange& keys, int token, int first_slot,
                           int sealed) const {
    using Row = typename Tile::KeyRow;
    const int thread = pc_opaque(pc_thread());
    const int first_row = thread / Tile::kLanes, chunk = thread % Tile::kLanes;
    const Global<T> column = Global<T>(cache.data) + (pc_block_y() * cache.head_stride + chunk * 8);
    const SharedAddress first = this->shared_.address(target + Row::at(first_row, chunk));
    PC_UNROLL
    for (int i = 0; i < Tile::kTokens; i += Tile::kCopyRows) {
      const int row = first_row + i;
      if (row < sealed) continue;  // fault: prefill_sealed_rows
      const pc_int64 from = slot_offset(cache, slots_.load(first_slot + row));
      pc_copy_async(Row::below(first, i), column, from, keys.has(token + row));
    }
  }

  // Starts to copy words and scales of keys. A quarter without keys of the item becomes zeros.
  PC_MEMBER void copy_key_words(const PcSealedPlane& key, const KeyRange& keys, int token, int rows) const {
    constexpr int kUnits = Tile::kChunks * 2;  // of 16 bytes: 4 words, or 4 scales of float32
    constexpr int kWords = Tile::kWordRows * kUnits, kAll = kWords + 2 * kUnits;  // of a quarter
    const int num_units = key.scale_type == PC_FLOAT32 ? kUnits : kUnits / 2;     // of a row of scales
    const pc_int64 head = pc_block_y();
    const Global<pc_uint8> words_of_head = Global<pc_uint8>(key.words) + head * key.head_stride;
    const Global<pc_uint8> scales_of_head = Global<pc_uint8>(key.scales) + head * key.scales_head_stride;
    PC_NO_UNROLL
    for (int at = pc_opaque(pc_thread()); at < rows / 16 * kAll; at += Tile::kThreads) {
      const int quarter = at / kAll, unit = at % kAll;
      const Slot slot = slots_.load(16 * quarter);
      const bool exists = has_quarter(keys, token + 16 * quarter);  // fault: prefill_sealed_quarters
      if (unit < kWords) {
        const pc_int64 row = slot.offset / Tile::kInWord + unit / kUnits;
        const pc_int64 from = slot.block * key.block_stride + row * key.row_stride + unit % kUnits * 16;
        pc_copy_async(words().address((quarter * kWords + unit) * 16), words_of_head, from, exists);
        continue;
      }
      const int row = unit / kUnits - Tile::kWordRows, of_row = unit % kUnits;
      if (of_row >= num_units) continue;
      const pc_int64 from = slot.block * key.scales_block_stride + slot.offset / key.group * key.scales_row_stride +
                            row * key.least_stride + of_row * 16;
      pc_copy_async(scales().address(((quarter * 2 + row) * kUnits + of_row) * 16), scales_of_head, from, exists);
    }
  }

  // Starts to copy words and scales of values. Tokens that the item does not have become zeros.
  PC_MEMBER void copy_value_words(const PcSealedPlane& value, const KeyRange& keys, int token, int rows) const {
    constexpr int kUnits = Tile::kValueBytes / 16, kPairs = Tile::kScalePitch / 4;  // of a row
    const Shared<Slot> slots = slots_ + Tile::kTokens;
    const pc_int64 head = pc_block_y();
    const Global<pc_uint8> words_of_head = Global<pc_uint8>(value.words) + head * value.head_stride;
    const Global<pc_uint8> scales_of_head = Global<pc_uint8>(value.scales) + head * value.scales_head_stride;
    PC_NO_UNROLL
    for (int at = pc_opaque(pc_thread()); at < rows * kUnits; at += Tile::kThreads) {
      const int row = at / kUnits, byte = at % kUnits * 16;
      const Slot slot = slots.load(row);
      const pc_int64 from = slot.block * value.block_stride + slot.offset * value.row_stride + byte;
      pc_copy_async(words().address(row * Tile::kValueBytes + byte), words_of_head, from, keys.has(token + row));
    }
    const int num_words = Tile::kChunks * 8 / value.group * (value.scale_type == PC_FLOAT32 ? 2 : 1);
    PC_NO_UNROLL
    for (int at = pc_opaque(pc_thread()); at < rows * kPairs; at += Tile::kThreads) {
      const int row = at / kPairs, word = at % kPairs;
      if (word >= num_words) continue;
      const Slot slot = slots.load(row);
      const pc_int64 from = slot.block * value.scales_block_stride + slot.offset * value.scales_row_stride + 4 * word;
      const bool exists = keys.has(token + row);  // fault: prefill_sealed_scales_of_other_items
      pc_copy_word_async(scales().address(row * Tile::kScalePitch + 4 * word), scales_of_head, from, exists);
    }
  }

  // ---- unpacking

  // Eight adjacent numbers of up to 4 bytes.
  PC_MEMBER static void load_eight(PcFloat type, const Shared<pc_uint8>& row, int at, float (&x)[8]) {
    PC_UNROLL
    for (int i = 0; i < 8; i += 2) load_two(type, row, at + i, x[i], x[i + 1]);
  }

  // Unpacks the keys of the first `rows` tokens. A thread has a chunk of kOwn adjacent tokens: each word holds a
  // channel of all of them.
  PC_MEMBER void unpack_keys(PcFloat type, int rows) const {
    using Row = typename Tile::KeyRow;
    constexpr int kDim = Tile::kChunks * 8;
    const int thread = pc_opaque(pc_thread());
    const int first_row = thread / Tile::kChunks * Tile::kOwn, chunk = thread % Tile::kChunks;
    if (first_row >= rows) return;
    const Shared<pc_uint8> scale_row = scales() + first_row / 16 * 2 * kDim * 4;
    const Shared<pc_uint32> word_row = words().template as<pc_uint32>() + first_row / Tile::kInWord * kDim;
    float scale[8], least[8];
    load_eight(type, scale_row, 8 * chunk, scale);
    load_eight(type, scale_row + kDim * 4, 8 * chunk, least);
    const pc_vector a = word_row.load_vector(8 * chunk), b = word_row.load_vector(8 * chunk + 4);
    const int shift = first_row % Tile::kInWord * Tile::kNumBits;
    pc_uint32 word[8];
    PC_UNROLL
    for (int i = 0; i < 8; ++i) word[i] = (i < 4 ? a.word[i] : b.word[i - 4]) >> shift;
    PC_UNROLL
    for (int t = 0; t < Tile::kOwn; ++t) {
      float x[8];
      PC_UNROLL
      for (int i = 0; i < 8; ++i) x[i] = number(word[i], t, {scale[i], least[i]});
      this->shared_.store_vector(Tile::kShape.keys_begin() + Row::at(first_row + t, chunk), packed(x));
    }
  }

  // Unpacks the values of the first `rows` tokens.
  PC_MEMBER void unpack_values(const PcSealedPlane& value, int rows) const {
    using Row = typename Tile::ValueRow;
    const int thread = pc_opaque(pc_thread()), chunk = thread % Tile::kChunks;
    const int group = chunk * 8 / value.group;
    PC_NO_UNROLL
    for (int row = thread / Tile::kChunks; row < rows; row += Tile::kThreads / Tile::kChunks) {
      const int byte = row * Tile::kValueBytes + chunk * Tile::kNumBits;
      const pc_uint32 word = Tile::kNumBits == 4 ? words().template as<pc_uint32>().load(byte / 4)
                                                 : words().template as<pc_uint16>().load(byte / 2);
      ScalePair pair;
      load_two(value.scale_type, scales() + row * Tile::kScalePitch, 2 * group, pair.scale, pair.least);
      float x[8];
      PC_UNROLL
      for (int i = 0; i < 8; ++i) x[i] = number(word, i, pair);
      this->shared_.store_vector(Tile::kShape.values_begin() + Row::at(row, chunk), packed(x));
    }
  }

  PC_MEMBER static float number(pc_uint32 word, int place, const ScalePair& pair) {
    constexpr pc_uint32 kMask = (1u << Tile::kNumBits) - 1;
    return in_range_of<T>(number_of_code(word >> (place * Tile::kNumBits) & kMask, pair));
  }
  PC_MEMBER static pc_vector packed(const float (&x)[8]) {
    return {{pc_pack<T>(x[0], x[1]), pc_pack<T>(x[2], x[3]), pc_pack<T>(x[4], x[5]), pc_pack<T>(x[6], x[7])}};
  }

  Shared<Slot> slots_;  // of keys, and of values; keys are one tile ahead
};

}  // namespace pagecore
