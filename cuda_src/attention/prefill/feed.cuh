// Inputs of prefill.cu: items, and the copies of queries and of tiles of keys and values.
#pragma once

#include "cuda_src/abi/plan.h"
#include "cuda_src/attention/softmax/splits.cuh"
#include "cuda_src/attention/tiles/tiles.cuh"
#include "cuda_src/shapes/prefill.h"

namespace pagecore {

template <bool kWide>
struct Bits {
  using Type = pc_uint32;
};
template <>
struct Bits<true> {
  using Type = pc_uint64;
};

// T: type of the elements. kDim, kValueDim: dims of keys and of values that the instance computes with.
// kBits: of the codes of a stored format; 0: the cache has elements of T. kSealed: the first tokens of sequences are in
// sealed blocks.
template <typename T, int kDim, typename ScoreOptions, int kValueDim, int kBits = 0, bool kSealed = false>
struct PrefillTile {
  using Element = T;
  using Options = ScoreOptions;
  using KeyRow = TileRow<kDim>;  // also of queries
  using ValueRow = TileRow<kValueDim>;
  static constexpr PcPrefillShape kShape = pc_prefill_tiles(kDim, kValueDim, Options::kFull, kBits, kSealed);
  static constexpr int kThreads = kShape.warps * 32;
  static constexpr int kTokens = kShape.tokens;
  static constexpr int kRowTiles = kShape.row_tiles;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kShape.rows();
  // Parts of a tile. Scores are held for one part at a time.
  static constexpr int kParts = Options::kWholeTile ? 1 : 2;
  static constexpr int kKeys = kTokens / kParts;  // of a part
  // One bit for each key of a part.
  using PartBits = typename Bits<(kKeys > 32)>::Type;
  static constexpr pc_uint64 kPartMask = ~0ull >> (64 - kKeys);
  static constexpr int kKeySteps = kDim / 16;          // of matrix instructions
  static constexpr int kKeyTiles = kKeys / 8;          // of S
  static constexpr int kValueTiles = kValueDim / 8;    // of O
  static constexpr int kLanes = KeyRow::kLanes;        // threads that copy a row of keys, of values or of queries
  static constexpr int kCopyRows = kThreads / kLanes;  // rows that the block copies together

  static_assert(kValueDim <= kDim, "the lanes that copy a row of keys are enough for one of values");
  static_assert(kTokens % kCopyRows == 0 && kFoldTokens % kTokens == 0, "a copy and a fold are of whole tiles");
  static_assert(kTokens <= 64 && kTokens <= kThreads,
                "a thread looks up one slot, and a tile has one bit for each key");
};

// The queries of an item of the schedule, clamped to those that exist. Registers are scarce: what the tiles do not need
// is loaded again after the last tile.
struct PrefillQueries {
  Splits splits;
  PcWorkItem work;

  PC_MEMBER PrefillQueries(const PcAttentionParams& p, int i) {
    work = load_item(p.schedule, i);
    splits = splits_of(work);
    clamp_queries(p, work);
  }

  PC_MEMBER int num_rows(const Heads& heads) const { return work.query_count * heads.count; }
};

// An item with its keys, clamped to the lengths.
struct PrefillItem : PrefillQueries {
  Sequence sequence;

  template <typename Options>
  PC_MEMBER static PrefillItem load(const PcAttentionParams& p, int i) {
    PrefillItem item(p, i);
    clamp_keys<Options>(p, item.sequence, item.work);
    return item;
  }

  PC_MEMBER KeyRange keys() const { return {work.key_begin, work.key_end}; }

 private:
  PC_MEMBER PrefillItem(const PcAttentionParams& p, int i)
      : PrefillQueries(p, i), sequence(load_sequence(p, work.sequence)) {}
};

// Fields of an item that all threads read for each tile.
struct alignas(16) ItemSpan {
  pc_int64 table_row;
  int item;  // of the schedule
  int pad[3];
  KeyRange common;  // keys that all of its queries attend to, ignoring the mask
};

static_assert(sizeof(ItemSpan) == 32, "the shape has room for it");

// The item of a feed, and the slots of its tokens. A thread looks up the slot of one token, two tiles ahead; slots are
// passed to the copying threads through shared memory.
template <typename Tile>
class PrefillSource {
 public:
  PC_MEMBER explicit PrefillSource(const Shared<pc_uint8>& shared)
      : shared_(shared), span_((shared + Tile::kShape.item_begin()).template as<ItemSpan>()), slot_{0, 0} {}

  // Stores the fields of the item that tiles need. A barrier of the block must follow.
  PC_MEMBER void start(const PcAttentionParams& p, const PrefillItem& item, int i) const {
    using Options = typename Tile::Options;
    KeyRange common = common_keys<Options>(p, item.sequence, item.work);
    if (item.work.query_count == 1 && !(Options::kTree && p.tree.words != 0)) common = {0, 0x7fffffff};
    if (pc_thread() == 0) span_.store(0, {item.sequence.table_row, i, {0, 0, 0}, common});
  }

  PC_MEMBER int item() const { return span_.load(0).item; }

  // Returns true if not all queries of the item attend to all keys of the tile.
  PC_MEMBER bool is_edge(int token) const {
    const KeyRange common = span_.load(0).common;
    return token < common.begin || token + Tile::kTokens > common.end;
  }

  // Looks up the slots of the tile that begins at `token`, one in each thread; store_*_slots passes them on.
  PC_MEMBER void look_up(const PcAttentionParams& p, const KeyRange& keys, int token) {
    const int own = token + pc_thread();
    slot_ = {0, 0};
    if (pc_thread() < Tile::kTokens && keys.has(own)) slot_ = load_slot(p, span_.load(0).table_row, own);
  }

 protected:
  Shared<pc_uint8> shared_;
  Shared<ItemSpan> span_;
  Slot slot_;
};

// The copies of tiles of a 16-bit cache. A feed has three steps, each of which every thread takes:
//
//   begin        for an item, after a barrier of the block: the copies of its first tile
//   open_keys    the keys of a tile are there, and the values of the last tile are not needed any more
//   open_values  the values of the tile are there, and its keys are not needed any more
template <typename Tile>
class PrefillFeed : public PrefillSource<Tile> {
  using Base = PrefillSource<Tile>;
  using T = typename Tile::Element;

 public:
  PC_MEMBER explicit PrefillFeed(const Shared<pc_uint8>& shared)
      : Base(shared), slots_((shared + Tile::kShape.slots_begin()).template as<pc_uint64>()) {}

  PC_MEMBER void begin(const PcAttentionParams& p, const KeyRange& keys, int token) {
    this->look_up(p, keys, token);
    store_key_slots(p);
    store_value_slots(p);
    pc_sync_block();
    copy_keys(p, keys, token);
    this->look_up(p, keys, token + Tile::kTokens);
  }

  PC_MEMBER void open_keys(const PcAttentionParams& p, const KeyRange& keys, int token) {
    pc_wait_copies<0>();
    pc_sync_block();
    copy_values(p, keys, token);
    store_key_slots(p);
  }

  PC_MEMBER void open_values(const PcAttentionParams& p, const KeyRange& keys, int token) {
    pc_wait_copies<0>();
    pc_sync_block();
    if (token + Tile::kTokens < keys.end) copy_keys(p, keys, token + Tile::kTokens);
    store_value_slots(p);
    this->look_up(p, keys, token + 2 * Tile::kTokens);
  }

 private:
  PC_MEMBER void store_key_slots(const PcAttentionParams& p) const {
    if (pc_thread() < Tile::kTokens) slots_.store(pc_thread(), slot_offset(p.key, this->slot_));
  }
  PC_MEMBER void store_value_slots(const PcAttentionParams& p) const {
    if (pc_thread() < Tile::kTokens) slots_.store(Tile::kTokens + pc_thread(), slot_offset(p.value, this->slot_));
  }

  PC_MEMBER void copy_keys(const PcAttentionParams& p, const KeyRange& keys, int token) const {
    copy<typename Tile::KeyRow>(p.key, Tile::kShape.keys_begin(), p.head_dim, keys, token, 0);
    pc_commit_copies();
  }
  PC_MEMBER void copy_values(const PcAttentionParams& p, const KeyRange& keys, int token) const {
    copy<typename Tile::ValueRow>(p.value, Tile::kShape.values_begin(), p.value_dim, keys, token, Tile::kTokens);
    pc_commit_copies();
  }

  // Each thread copies one chunk of every kCopyRows-th row. A thread whose chunk lies past the dims of the call writes
  // zeros, as if none of the tokens existed.
  template <typename Row>
  PC_MEMBER void copy(const PcCache& cache, int target, int dim, const KeyRange& keys, int token,
                      int first_slot) const {
    // Opaque for whole tiles: their scores need the registers in which the compiler would keep these between tiles.
    const int thread = Tile::Options::kWholeTile ? pc_opaque(pc_thread()) : pc_thread();
    const int head = Tile::Options::kWholeTile ? pc_opaque(pc_block_y()) : pc_block_y();
    const int first_row = thread / Tile::kLanes, chunk = thread % Tile::kLanes;
    const Global<T> column = Global<T>(cache.data) + (head * cache.head_stride + chunk * 8);
    const SharedAddress first = this->shared_.address(target + Row::at(first_row, chunk));
    const KeyRange own_keys = keys.only_if(chunk * 8 < dim);  // fault: prefill_keys_past_dims
    if (chunk >= Row::kChunks) return;
    constexpr int kCopies = Tile::kTokens / Tile::kCopyRows;
    constexpr int kAhead = !Tile::Options::kSlotsFirst ? 1 : Tile::Options::kWholeTile ? kCopies / 2 : kCopies;
    PC_UNROLL
    for (int i = 0; i < kCopies; i += kAhead) {
      pc_int64 from[kAhead];
      PC_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        from[k] = static_cast<pc_int64>(slots_.load(first_slot + first_row + (i + k) * Tile::kCopyRows));
      }
      PC_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int row = (i + k) * Tile::kCopyRows;
        pc_copy_async(Row::below(first, row), column, from[k], own_keys.has(token + first_row + row));
      }
    }
  }

  Shared<pc_uint64> slots_;
};

// Starts to copy an item's queries. Rows past the rows of the item, and dims past head_dim, become 0.
template <typename Tile>
PC_DEVICE void copy_queries(const PcAttentionParams& p, const Heads& heads, const PrefillQueries& item,
                            const Shared<pc_uint8>& queries) {
  using Row = typename Tile::KeyRow;
  const Global<typename Tile::Element> query(p.query.data);
  const int chunk = pc_thread() % Tile::kLanes, first_row = pc_thread() / Tile::kLanes;
  const int num_rows = chunk * 8 < p.head_dim ? item.num_rows(heads) : 0;  // fault: prefill_queries_past_dims
  if (chunk >= Row::kChunks) return;
  for (int row = first_row; row < Tile::kRows; row += Tile::kCopyRows) {
    const bool exists = row < num_rows;
    const int query_row = item.work.query_begin + row / heads.count, head = heads.first + row % heads.count;
    const pc_int64 from = exists ? row_offset(p.query, query_row, head) + chunk * 8 : 0;
    pc_copy_async(queries.address(Row::at(row, chunk)), query, from, exists);
  }
}

// Negates the queries; each thread those that it copied in copy_queries.
template <typename Tile>
PC_DEVICE void negate_queries(const Shared<pc_uint8>& queries) {
  using Row = typename Tile::KeyRow;
  const int chunk = pc_thread() % Tile::kLanes;
  if (chunk >= Row::kChunks) return;
  for (int row = pc_thread() / Tile::kLanes; row < Tile::kRows; row += Tile::kCopyRows) {
    pc_vector v = queries.load_vector(Row::at(row, chunk));
    for (int k = 0; k < 4; ++k) v.word[k] ^= 0x80008000u;
    queries.store_vector(Row::at(row, chunk), v);
  }
}

}  // namespace pagecore
