// Attention of few queries over many keys: 16-bit caches, dims that are multiples of 8, up to 256.
//
// An instance computes with kDim dims of keys and kValueDim of values (pc_matrix_dims). Dims past those of the call are
// zeros in shared memory, are never read from the cache (tiles.cuh) and are not written to the output.
//
// A CTA is one worker of the schedule for one key head. An item has at most 16 packed rows, query * heads + head. These
// are the left operand of m16n8k16, so that keys and values are read once for all query heads that share them.
//
//               16 keys of a warp's tile
//             +--------------------------+
//   16 rows   |  S = Q K^T               |   Q   shared memory for the whole item, ldmatrix
//             +--------------------------+   K   shared memory, ldmatrix
//                                            S   registers: 2 fragments; weights are repacked as left operand
//               kValueDim
//             +--------------------------+   V   shared memory, ldmatrix transposed
//   16 rows   |  O += P V                |   O   registers: kValueDim / 8 fragments
//             +--------------------------+
//
// Warps take tiles in turn (tile_walk.cuh). Each warp has a running softmax of its own, and warps exchange sums only at
// the end of an item: largest scores, sums and O go through shared memory, O into the stage that was used last.
//
// In flight: every warp has a ring of `stages` tiles, each of 16 keys and 16 values. A stage is refilled as soon as it
// is used, across the ends of items (round_loop.cuh). The rings of a CTA take 64 to 80 KiB (pc_decode_ring), so that
// two CTAs have 128 KiB in flight on a multiprocessor of an H200. That is 3.5 times its share of 4.8 TB/s in a
// microsecond, and enough while one of the two CTAs ends an item. Padded dims have less in flight: 80 KiB, 2.2 times,
// for head dim 80. Block ids are loaded one tile before the copies that need them.
//
// Bytes: keys and values are read once; queries once for each split; partial rows, float32, are written once and read
// once.

#include "cuda_src/attention/decode/ring.cuh"
#include "cuda_src/attention/decode/rows.cuh"
#include "cuda_src/attention/decode/sealed_rows.cuh"
#include "cuda_src/attention/decode/stored_rows.cuh"
#include "cuda_src/attention/tiles/round_loop.cuh"

namespace pagecore {

// The phases of run_rounds.
template <typename Tile, typename TileRing, typename TileRows>
class DecodeWorker {
  using ItemRounds = Rounds<Tile::kTokens, Tile::kWarps>;
  using Exchange = DecodeExchange<Tile>;

 public:
  using Ring = TileRing;
  using Rows = TileRows;
  static constexpr int kStages = Tile::kStages;
  // Every item is opened, and join() loads whether its tile is split: a flag would take a register.
  static constexpr bool kJoinsAll = true;

  PC_MEMBER DecodeWorker(const PcAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads)
      : shared_(shared),
        heads_(heads),
        rule_(make_rule<typename Rows::Options>(p, heads.kv)),
        keys_{0, 0},
        token_(0),
        num_rows_(0) {}

  PC_MEMBER int open(const PcAttentionParams& p, Rows& rows, int i, int stage, bool& /*split*/) {
    PcWorkItem item = load_item(p.schedule, i);
    const Sequence sequence = load_sequence(p, item.sequence);
    clamp_numbers<typename Rows::Options>(p, sequence, item);
    rows.load(p, heads_, sequence, item, rule_.negate);
    token_ = ItemRounds::first_token(item) + pc_warp() * Tile::kTokens;
    keys_ = {item.key_begin, item.key_end};
    num_rows_ = item.query_count * heads_.count;
    const int rounds = ItemRounds::count(item);
    pc_sync_block();  // fault: decode_barrier_after_queries
    if (rounds == 0) write_rows(p, i, Exchange(shared_, stage), false);
    return rounds;
  }

  PC_MEMBER void attend(const PcAttentionParams& p, const Ring& ring, Rows& rows, int stage) {
    ring.wait();
    if (keys_.overlaps(token_, Tile::kTokens)) {
      rows.score(p, rule_, ring.keys(stage), token_);
      rows.softmax(rule_.factor);
      rows.accumulate(p, ring.values(stage), token_);
    }
    token_ += ItemRounds::kStep;
  }

  PC_MEMBER void store(const PcAttentionParams& p, Rows& rows, int i, int stage, int rounds) {
    if (rounds != 0) return;
    const Exchange exchange(shared_, stage);
    rows.complete();
    pc_sync_warp();
    exchange.store(rows, rule_.factor, num_rows_);
    pc_sync_block();  // fault: decode_barrier_before_sums
    write_rows(p, i, exchange, true);
    pc_sync_block();  // fault: decode_barrier_after_sums
  }

  PC_MEMBER void join(const PcAttentionParams& p, int i) const {
    PcWorkItem item = load_item(p.schedule, i);
    const Splits splits = splits_of(item);
    clamp_queries(p, item);
    const Shared<int> flag = (shared_ + Tile::kRing.flag_begin()).template as<int>();
    if (splits.count > 1) join_if_last<4>(p, heads_, item, splits, flag);
  }

 private:
  // Writes the rows of item i, whose last key has been processed, to the output or to the item's partial rows. For an
  // item without keys the exchange area is uninitialised and not read. Item fields that the rounds do not need are
  // loaded again here to save registers.
  PC_MEMBER void write_rows(const PcAttentionParams& p, int i, const Exchange& exchange, bool has_keys) const {
    constexpr int kVectors = Tile::kValues / 4;  // of a row; vectors past value_dim are padding
    PcWorkItem item = load_item(p.schedule, i);
    const Splits splits = splits_of(item);
    clamp_queries(p, item);
    const bool whole = splits.count == 1;
    const float row_factor = whole ? load_row_factor(p, heads_.kv) : 1.0f;
    const int tasks = item.query_count * heads_.count * kVectors;
    for (int task = pc_thread(); task < tasks; task += pc_num_threads()) {
      const int row = task / kVectors, d = task % kVectors * 4;
      if (d >= p.value_dim) continue;  // fault: decode_output_past_dims
      const int query = row / heads_.count, head = heads_.first + row % heads_.count;
      typename Exchange::Sums sums = {-pc_infinity(), 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
      if (has_keys) sums = exchange.load(row, d);
      const float sink = whole ? load_sink(p, head) : -pc_infinity();  // fault: sinks_in_every_split
      const RowEnd end = end_row(sums.top, sums.sum, sink);
      PC_UNROLL
      for (int k = 0; k < 4; ++k) sums.x[k] *= end.factor * row_factor;
      const ResultRow target = result_row(p, item, splits, query, head);
      store_floats<4>(target.type, target.data, target.first + d, sums.x);
      if (d == 0) target.store_lse(end.lse);
    }
  }

  Shared<pc_uint8> shared_;
  Heads heads_;
  ScoreRule rule_;
  KeyRange keys_;  // of the item
  int token_;      // first token of the warp's tile
  int num_rows_;   // of the item
};

template <typename T, int kDim, typename Options, int kValueDim = kDim>
PC_KERNEL(pc_decode_shape(kDim, kValueDim).threads, pc_decode_shape(kDim, kValueDim).blocks_per_sm)
void decode(const PcAttentionParams p) {
  using Tile = TileFor<DecodeTile<T, kDim, kValueDim>, Options>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const int padding = first_padding_row(p);
  const WorkRange work = load_work(p.schedule, pc_block_x());
  DecodeRing<Tile> ring(p, shared, heads, work);
  DecodeRows<Tile, Options> rows(shared);
  DecodeWorker<Tile, DecodeRing<Tile>, DecodeRows<Tile, Options>> worker(p, shared, heads);
  run_rounds(p, work, worker, ring, rows);
  clear_padding(p, heads, padding);  // no copies are in flight: the last groups are empty
}

// Keys and values are of one stored format (stored.cuh, stored_rows.cuh).
template <typename T, int kBits, int kDim, typename Options>
PC_KERNEL(pc_stored_shape(kBits, kDim).threads, pc_stored_shape(kBits, kDim).blocks_per_sm)
void decode_stored(const PcStoredAttentionParams params) {
  using Tile = TileFor<StoredTile<T, kBits, kDim>, Options>;
  const PcAttentionParams& p = params.attention;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const WorkRange work = load_work(p.schedule, pc_block_x());
  DecodeStoredRing<Tile> ring(params, shared, heads, work);
  StoredRows<Tile, Options> rows(params, shared);
  DecodeWorker<Tile, DecodeStoredRing<Tile>, StoredRows<Tile, Options>> worker(p, shared, heads);
  run_rounds(p, work, worker, ring, rows);
  clear_padding(p, recompute_block_heads(p), first_padding_row(p));  // no register holds these during the rounds
}

// The first tokens of sequences are in sealed blocks (sealed.cuh, sealed_rows.cuh).
template <typename T, int kDim, typename InstanceOptions, int kValueDim = kDim>
PC_KERNEL(pc_decode_sealed_shape(kDim, kValueDim).threads, pc_decode_sealed_shape(kDim, kValueDim).blocks_per_sm)
void decode_sealed(const PcSealedAttentionParams params) {
  using Options = OverSealed<InstanceOptions>;
  using Tile = TileFor<SealedTile<T, kDim, kValueDim>, Options>;
  const PcAttentionParams& p = params.attention;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const WorkRange work = load_work(p.schedule, pc_block_x());
  DecodeSealedRing<Tile> ring(params, shared, heads, work);
  SealedDecodeRows<Tile, Options> rows(shared);
  DecodeWorker<Tile, DecodeSealedRing<Tile>, SealedDecodeRows<Tile, Options>> worker(p, shared, heads);
  run_rounds(p, work, worker, ring, rows);
  clear_padding(p, recompute_block_heads(p), first_padding_row(p));
}

}  // namespace pagecore
