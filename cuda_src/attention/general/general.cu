// Attention in float32 by fused multiply-adds: float32 caches, and every call that the matrix kernels do not serve.
// Query, key and value may have different types, dims and alignments; head_dim and value_dim are at most kDim.
//
// A CTA is one worker of the schedule for one key head, or for a chunk of its query heads. Items have any number of
// packed rows, query * heads + head. If an item has more rows than the block holds, the worker passes over its items
// again for the next rows.
//
//                 kDim: four dims of a lane, two or four vectors of four from 256 on
//               +---------------------------------------------+
//   rows of a   |  Q: shared memory   O: registers            |   16 rows; 8 from kDim 128 on; 4 at 512
//   warp        +---------------------------------------------+
//   8 tokens    |  K, V: shared memory, a lane reads its dims |
//               +---------------------------------------------+
//
// A lane multiplies its dims of 4 rows and 8 tokens. The 32 sums are then exchanged between lanes so that each lane has
// one score, and one softmax instruction serves all of them. Weights go through shared memory. Up to kDim 64 half a
// warp holds all dims, and each half processes every other token.
//
// In flight: every warp has a ring of its own, as in decode.cu; 64 KiB for a CTA. If an item has no more rows than a
// warp holds, each warp processes its own tiles. With more rows, rows are divided among warps too, and a warp also
// processes the tiles of other warps: all tiles of the round if each warp has rows of its own, as it always is in
// batch-invariant calls. Rows that cp.async cannot copy are loaded element by element when a stage is filled. 16-bit
// elements, and codes of stored formats (general_stored), are widened to float32 in place before their use. Sealed
// blocks, and the caches of the tokens after them (general_sealed), become float32 when a stage is filled.
//
// Bytes: keys and values are read once for each block of rows; queries once for each split; partial rows are written
// once and read once.

#include "cuda_src/abi/plan.h"
#include "cuda_src/attention/general/ring.cuh"
#include "cuda_src/attention/general/rows.cuh"
#include "cuda_src/attention/general/sealed.cuh"
#include "cuda_src/attention/general/stored.cuh"
#include "cuda_src/attention/tiles/round_loop.cuh"

namespace pagecore {

// The current piece of an item whose keys are summed in pieces of fold_tokens. Each piece is added to the sum of those
// before it: largest lse and sum in shared memory, values in the worker's own partial rows.
struct Piece {
  bool folds;  // the item has more than one piece
  bool last;
  int index;
};

// The phases of run_rounds.
template <int kDim, typename Options, typename TileRing>
class GeneralWorker {
  using Tile = GeneralTile<kDim>;
  using ItemRounds = Rounds<Tile::kTokens, Tile::kWarps>;
  using Exchange = GeneralExchange<kDim>;

 public:
  using Ring = TileRing;
  using Rows = GeneralRows<kDim, Options>;
  static constexpr int kStages = Tile::kStages;
  static constexpr bool kJoinsAll = false;  // items without rows in the block are skipped

  PC_MEMBER GeneralWorker(const PcAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads)
      : shared_(shared),
        heads_(heads),
        rule_(make_rule<Options>(p, heads.kv)),
        block_{heads.count, 0, p.fold_tokens != 0},
        keys_{0, 0},
        piece_{false, true, 0},
        token_(0),
        more_(false) {
    const pc_int64 element = p.out_type == PC_FLOAT32 ? 4 : p.out_type == PC_FLOAT8_E4M3 ? 1 : 2;
    const pc_uint64 steps = p.out.token_stride | p.out.head_stride | p.value_dim;
    by_four_ = steps % 4 == 0 && p.out.data % (4 * element) == 0;
  }

  // Begins a pass over the items, for the rows of the block. Fields of the last item are cleared although open() sets
  // them, so that they take no registers until then.
  PC_MEMBER void start_pass(const PcAttentionParams& p, const WorkRange& work, Ring& ring) {
    more_ = false;
    token_ = 0;
    keys_ = {0, 0};
    piece_ = {false, true, 0};
    ring.start(p, work, block_);
  }

  // Moves the block to its next rows; returns false if no item has any.
  PC_MEMBER bool next_rows() {
    block_.first_row += Tile::kWarps * Tile::kRows;
    return more_;
  }

  PC_MEMBER int open(const PcAttentionParams& p, Rows& rows, int i, int stage, bool& split) {
    PcWorkItem item = load_item(p.schedule, i);
    const Splits splits = splits_of(item);
    const Sequence sequence = load_sequence(p, item.sequence);
    clamp_numbers<Options>(p, sequence, item);
    if (block_.rows(item) == 0) return 0;
    const bool ends = item.query_count * heads_.count <= block_.first_row + Tile::kWarps * Tile::kRows;
    more_ = more_ || !ends;
    split = ends && splits.count > 1;
    rows.load(p, heads_, sequence, item, block_, rule_.negate);
    const int rounds = ItemRounds::count(item);
    token_ = ItemRounds::first_token(item);
    keys_ = {item.key_begin, item.key_end};
    piece_.folds = p.fold_tokens != 0 && splits.count == 1 && rounds != 0 &&
                   item.key_begin / p.fold_tokens != (item.key_end - 1) / p.fold_tokens;
    piece_.index = 0;
    pc_sync_block();
    if (rounds == 0) {
      piece_.last = true;
      write_rows(p, i, stage, false);
    }
    return rounds;
  }

  PC_MEMBER void attend(const PcAttentionParams& p, const Ring& ring, Rows& rows, int stage) {
    ring.wait(stage, keys_.overlaps(token_ + pc_warp() * Tile::kTokens, Tile::kTokens));
    const bool shares_tiles = rows.sharers() != Tile::kWarps;
    if (shares_tiles) pc_sync_block();  // fault: general_barrier_before_tiles
    for (int w = pc_warp() % rows.sharers(); rows.has_rows() && w < Tile::kWarps; w += rows.sharers()) {
      const int token = token_ + w * Tile::kTokens;
      if (!keys_.overlaps(token, Tile::kTokens)) continue;
      rows.compute_weights(p, rule_, ring.keys(stage, w), token);
      rows.accumulate(ring.values(stage, w));
    }
    token_ += ItemRounds::kStep;
    if (shares_tiles) pc_sync_block();  // fault: general_barrier_after_tiles
  }

  PC_MEMBER void store(const PcAttentionParams& p, Rows& rows, int i, int stage, int rounds) {
    piece_.last = rounds == 0;
    if (!piece_.last && !(piece_.folds && token_ % p.fold_tokens == 0)) return;
    const Exchange exchange(shared_, stage);
    rows.store(exchange.sums(pc_warp()), exchange.o(pc_warp()), rule_.factor);
    pc_sync_block();
    write_rows(p, i, stage, true);
    pc_sync_block();
    ++piece_.index;
    rows.clear();
  }

  PC_MEMBER void join(const PcAttentionParams& p, int i) {
    PcWorkItem item = load_item(p.schedule, i);
    const Splits splits = splits_of(item);
    clamp_queries(p, item);
    const Shared<int> flag = (shared_ + Tile::kRing.flag_begin()).template as<int>();
    if (by_four_) {
      join_if_last<4>(p, heads_, item, splits, flag);
    } else {
      join_if_last<1>(p, heads_, item, splits, flag);
    }
  }

 private:
  PC_MEMBER void write_rows(const PcAttentionParams& p, int i, int stage, bool has_keys) const {
    if (by_four_) {
      write_vectors<4>(p, i, stage, has_keys);
    } else {
      write_vectors<1>(p, i, stage, has_keys);
    }
  }

  // Writes the block's rows of item i, after the last key of the item or of a piece: to the output, to the item's
  // partial rows, or to the worker's own partial rows. Without keys the exchange area is uninitialised and not read.
  template <int N>
  PC_MEMBER void write_vectors(const PcAttentionParams& p, int i, int stage, bool has_keys) const {
    const Exchange exchange(shared_, stage);
    PcWorkItem item = load_item(p.schedule, i);
    const Splits splits = splits_of(item);
    clamp_queries(p, item);
    const bool whole = splits.count == 1 && piece_.last;
    const float row_factor = whole ? load_row_factor(p, heads_.kv) : 1.0f;
    const int rows = block_.rows(item), vectors = p.value_dim / N;
    for (int task = pc_thread(); task < rows * vectors; task += pc_num_threads()) {
      const int row = task / vectors, d = task % vectors * N;
      const int query = (block_.first_row + row) / heads_.count;
      const int head = heads_.first + (block_.first_row + row) % heads_.count;
      const auto sums =
          has_keys ? exchange.template load<N>(row, d, block_.teams(rows)) : Exchange::template no_sums<N>();
      const float sink = whole ? load_sink(p, head) : -pc_infinity();
      RowEnd end = end_row(sums.top, sums.sum, piece_.folds ? -pc_infinity() : sink);
      float x[N];
      PC_UNROLL
      for (int k = 0; k < N; ++k) x[k] = sums.x[k] * (piece_.folds ? end.factor : end.factor * row_factor);
      if (piece_.folds) {
        const JoinedRow<N> joined = fold<N>(p, row, query, head, d, end.lse, x);
        if (!piece_.last) continue;
        end = joined.end(sink);
        PC_UNROLL
        for (int k = 0; k < N; ++k) x[k] = joined.x[k] * (end.factor * row_factor);
      }
      const ResultRow target = result_row(p, item, splits, query, head);
      store_floats<N>(target.type, target.data, target.first + d, x);
      if (d == 0) target.store_lse(end.lse);
    }
  }

  // Adds a piece of a row to the sum of the pieces before it, and keeps the sum for the next piece.
  template <int N>
  PC_MEMBER JoinedRow<N> fold(const PcAttentionParams& p, int row, int query, int head, int d, float lse,
                              const float (&x)[N]) const {
    const Shared<float> folds = (shared_ + Tile::kRing.folds_begin()).template as<float>();
    const int own_folds = piece_.index % 2 * Tile::kRing.fold_rows;
    const int last_folds = Tile::kRing.fold_rows - own_folds;
    const pc_int64 kept = ((first_own_row(p) + query) * p.num_query_heads + head) * p.value_dim + d;
    JoinedRow<N> joined;
    joined.clear();
    if (piece_.index != 0) {
      joined.top = folds.load(2 * (last_folds + row));
      joined.sum = folds.load(2 * (last_folds + row) + 1);
      load_floats<N>(Global<float>(p.partial_out), kept, joined.x);
    }
    joined.add(lse, x);
    if (!piece_.last) {
      store_floats<N>(PC_FLOAT32, p.partial_out, kept, joined.x);
      if (d == 0) folds.store(2 * (own_folds + row), joined.top);
      if (d == 0) folds.store(2 * (own_folds + row) + 1, joined.sum);
    }
    return joined;
  }

  // The first of the partial rows that a worker of a batch-invariant plan has to itself, after those of splits.
  PC_MEMBER static pc_int64 first_own_row(const PcAttentionParams& p) {
    const int query_tile = max_of(kPromptRows / (p.num_query_heads / p.num_kv_heads), 1);
    return p.num_partial_rows - static_cast<pc_int64>(pc_num_blocks_x() - pc_block_x()) * query_tile;
  }

  Shared<pc_uint8> shared_;
  Heads heads_;
  ScoreRule rule_;
  GeneralBlock<kDim> block_;
  KeyRange keys_;  // of the item
  Piece piece_;
  int token_;     // first token of the round
  bool more_;     // an item has rows after those of the block
  bool by_four_;  // four elements of the output can be stored together
};

template <int kDim, typename Options, typename Ring>
PC_DEVICE void attend_general(const PcAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads,
                              int padding, const WorkRange& work, Ring& ring) {
  GeneralRows<kDim, Options> rows(shared);
  GeneralWorker<kDim, Options, Ring> worker(p, shared, heads);
  do {
    worker.start_pass(p, work, ring);
    run_rounds(p, work, worker, ring, rows);
  } while (worker.next_rows());
  // No copies are in flight: the last groups are empty. Selections have no registers for these during the rounds.
  if constexpr (Options::kSelected) {
    clear_padding(p, recompute_block_heads(p), first_padding_row(p));
  } else {
    clear_padding(p, heads, padding);
  }
}

template <int kDim, typename Options>
PC_KERNEL(pc_general_shape(kDim).threads, pc_general_shape(kDim).blocks_per_sm)
void general(const PcAttentionParams p) {
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const int padding = first_padding_row(p);
  const WorkRange work = load_work(p.schedule, pc_block_x());
  using Plane = PlainPlane<kDim>;
  GeneralRing<kDim, Plane, Options> ring(shared, Plane(p.key, p.key_type, p.head_dim, heads.kv),
                                         Plane(p.value, p.value_type, p.value_dim, heads.kv));
  attend_general<kDim, Options>(p, shared, heads, padding, work, ring);
}

// Keys or values, or both, are of a stored format.
template <int kDim, typename Options>
PC_KERNEL(pc_general_shape(kDim).threads, pc_general_shape(kDim).blocks_per_sm)
void general_stored(const PcStoredAttentionParams p) {
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p.attention);
  const int padding = first_padding_row(p.attention);
  const WorkRange work = load_work(p.attention.schedule, pc_block_x());
  using Plane = StoredPlane<kDim>;
  GeneralRing<kDim, Plane, Options> ring(shared, Plane(p.key, p.attention.head_dim, heads.kv),
                                         Plane(p.value, p.attention.value_dim, heads.kv));
  attend_general<kDim, Options>(p.attention, shared, heads, padding, work, ring);
}

// The first tokens of sequences are in sealed blocks.
template <int kDim, typename InstanceOptions>
PC_KERNEL(pc_general_shape(kDim).threads, pc_general_shape(kDim).blocks_per_sm)
void general_sealed(const PcSealedAttentionParams p) {
  using Options = OverSealed<InstanceOptions>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p.attention);
  const int padding = first_padding_row(p.attention);
  const WorkRange work = load_work(p.attention.schedule, pc_block_x());
  GeneralSealedRing<kDim, Options> ring(shared);
  attend_general<kDim, Options>(p.attention, shared, heads, padding, work, ring);
}

}  // namespace pagecore
