// Attention in float32, by fused multiply-adds: float32 caches, and whatever the matrix kernels do not serve. Query,
// key and value may be of different types, dims and alignments; head_dim and value_dim are at most kDim.
//
// A CTA is one worker of the schedule for one key head, or a chunk of its query heads. Items have any number of packed
// rows, query * heads + head; where they are more than the block holds, the worker goes through its items again for the
// next ones.
//
//                 kDim, four dims a lane (twice, four times that from 256 on)
//               +--------------------------------------------+
//   rows of a   |  Q: shared memory   O: registers           |   16, from kDim 128 on 8, 4 at 512
//   warp        +--------------------------------------------+
//   8 tokens    |  K, V: shared memory, a lane reads its dims |
//               +--------------------------------------------+
//
// A lane multiplies its dims of 4 rows and 8 tokens; the 32 sums of lanes are then exchanged so that each lane ends
// with one score, whose softmax costs one instruction for all. Weights go around through shared memory. Up to kDim 64,
// half a warp has all dims, and each half has every other token.
//
// Every warp has a ring of its own and fills it as in decode.cu: 64 KiB in flight for a CTA. Where an item has no more
// rows than a warp, each warp works on its own tiles; with more, rows are divided too, and a warp works on the tiles of
// others: on all of them where each warp has rows of its own, as it always is in batch-invariant calls. Rows that
// cannot be copied by 16 bytes are loaded element by element when a stage is filled. 16-bit elements become float32
// where they lie, before their use.
//
// Bytes: keys and values once for each block of rows; queries once a split; partial rows once written and once read.

#include "abi_plan.h"
#include "general_ring.cuh"
#include "general_rows.cuh"

namespace pagecore {

// Which part of a whole tile has been summed, where its keys are summed in pieces (fold_tokens): the last joins what
// the pieces before it have left, largest lse and sum in shared memory, values in the worker's own partial rows.
struct Piece {
  bool folds;
  bool last;
  int index;
};

// The first of the rows that each worker of a batch-invariant plan has behind those of splits.
PC_DEVICE pc_int64 first_own_row(const PcAttentionParams& p) {
  const int query_tile = max_of(kPromptRows / (p.num_query_heads / p.num_kv_heads), 1);
  return p.num_partial_rows - static_cast<pc_int64>(pc_num_blocks_x() - pc_block_x()) * query_tile;
}

// The block's rows of item i, whose keys, or those of a piece, have all been seen: the output itself, the item's part
// of it, or what the next piece goes on with. Without keys nothing has been exchanged.
template <int N, int kDim>
PC_DEVICE void store_rows(const PcAttentionParams& p, const Heads& heads, const GeneralBlock<kDim>& block, int i,
                          const Piece& piece, const Shared<pc_uint8>& shared, int stage, bool has_keys) {
  using Exchange = GeneralExchange<kDim>;
  const Exchange exchange(shared, stage);
  const Shared<float> folds = (shared + GeneralTile<kDim>::kRing.folds_begin()).template as<float>();
  const int own_folds = piece.index % 2 * GeneralTile<kDim>::kRing.fold_rows;
  const int last_folds = GeneralTile<kDim>::kRing.fold_rows - own_folds;
  PcWorkItem item = load_item(p.schedule, i);
  const Splits splits = splits_of(item);
  fit_queries(p, item);
  const bool whole = splits.count == 1 && piece.last;
  const float value_scale = whole ? load_number(p.value_scale, heads.kv, 1.0f) : 1.0f;
  const int rows = block.rows(item), vectors = p.value_dim / N;
  for (int task = pc_thread(); task < rows * vectors; task += pc_num_threads()) {
    const int row = task / vectors, d = task % vectors * N;
    const int query = (block.first_row + row) / heads.count, query_row = item.query_begin + query;
    const int head = heads.first + (block.first_row + row) % heads.count;
    const auto sums = has_keys ? exchange.template load<N>(row, d, block.teams(rows)) : Exchange::template no_sums<N>();
    const float sink = whole ? load_sink(p, head) : -pc_infinity();
    RowEnd end = end_row(sums.top, sums.sum, piece.folds ? -pc_infinity() : sink);
    float x[N];
    PC_UNROLL
    for (int k = 0; k < N; ++k) x[k] = sums.x[k] * (piece.folds ? end.factor : end.factor * value_scale);
    if (piece.folds) {
      const pc_int64 kept = ((first_own_row(p) + query) * p.num_query_heads + head) * p.value_dim + d;
      JoinedRow<N> joined;
      joined.clear();
      if (piece.index != 0) {
        joined.top = folds.load(2 * (last_folds + row));
        joined.sum = folds.load(2 * (last_folds + row) + 1);
        load_floats<N>(Global<float>(p.partial_out), kept, joined.x);
      }
      joined.add(end.lse, x);
      if (!piece.last) {
        store_floats<N>(PC_FLOAT32, p.partial_out, kept, joined.x);
        if (d == 0) folds.store(2 * (own_folds + row), joined.top);
        if (d == 0) folds.store(2 * (own_folds + row) + 1, joined.sum);
        continue;
      }
      end = joined.end(sink);
      PC_UNROLL
      for (int k = 0; k < N; ++k) x[k] = joined.x[k] * (end.factor * value_scale);
    }
    if (whole) {
      store_floats<N>(p.query_type, p.out.data, row_offset(p.out, query_row, head) + d, x);
      if (d == 0) store_lse(p, query_row, head, end.lse);
    } else {
      store_partial<N>(p, splits.row(query), head, d, x);
      if (d == 0) store_partial_lse(p, splits.row(query), head, end.lse);
    }
  }
}

template <int kDim>
PC_DEVICE void store_item(const PcAttentionParams& p, const Heads& heads, const GeneralBlock<kDim>& block, int i,
                          const Piece& piece, bool by_four, const Shared<pc_uint8>& shared, int stage, bool has_keys) {
  if (by_four) {
    store_rows<4, kDim>(p, heads, block, i, piece, shared, stage, has_keys);
  } else {
    store_rows<1, kDim>(p, heads, block, i, piece, shared, stage, has_keys);
  }
}

// Joins the parts of item i's tile where this CTA was the last of them.
PC_DEVICE void join_item(const PcAttentionParams& p, const Heads& heads, int i, bool by_four, const Shared<int>& flag) {
  PcWorkItem item = load_item(p.schedule, i);
  const Splits splits = splits_of(item);
  fit_queries(p, item);
  if (by_four) {
    join_if_last<4>(p, heads, item, splits, flag);
  } else {
    join_if_last<1>(p, heads, item, splits, flag);
  }
}

template <int kDim, typename Options>
PC_KERNEL(pc_general_shape(kDim).threads, pc_general_shape(kDim).blocks_per_sm)
void general(const PcAttentionParams p) {
  using Tile = GeneralTile<kDim>;
  using ItemRounds = Rounds<Tile::kTokens, Tile::kWarps>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const int padding = first_padding_row(p);
  const WorkRange work = load_work(p.schedule, pc_block_x());
  const ScoreRule rule = make_rule<Options>(p, heads.kv);
  GeneralRing<kDim> ring(p, shared, heads);
  GeneralRows<kDim, Options> rows(shared);
  // Whether results can be written four at a time.
  const pc_int64 element = p.query_type == PC_FLOAT32 ? 4 : 2;
  const pc_uint64 places = p.out.token_stride | p.out.head_stride | p.value_dim;
  const bool by_four = places % 4 == 0 && p.out.data % (4 * element) == 0;

  GeneralBlock<kDim> block = {heads.count, 0, p.fold_tokens != 0};
  for (bool more = true; more; block.first_row += Tile::kWarps * Tile::kRows) {
    more = false;
    ring.start(p, work, block);
    // A pass of this loop is one round of an item, or an item without keys.
    int i = work.first - 1, rounds = 0, token = 0, join = -1;  // `token`: the first of the round
    KeyRange keys = {0, 0};
    Piece piece = {false, true, 0};
    int stage = 0, num_used = Tile::kStages;  // stages that can be filled: this one and those behind it
    while (true) {
      for (; num_used > 0; --num_used) {
        ring.fill(p, stage);
        stage = Tile::next(stage);
      }
      // All stages are on their way, and `stage` is the oldest.
      if (rounds == 0) {
        if (join >= 0) join_item(p, heads, join, by_four, (shared + Tile::kRing.flag_begin()).template as<int>());
        join = -1;
        if (++i >= work.end) break;
        PcWorkItem item = load_item(p.schedule, i);
        const Splits splits = splits_of(item);
        const Sequence sequence = load_sequence(p, item.sequence);
        fit_item(p, sequence, item);
        if (block.rows(item) == 0) continue;
        const bool ends = item.query_count * heads.count <= block.first_row + Tile::kWarps * Tile::kRows;
        more = more || !ends;
        if (ends && splits.count > 1) join = i;
        rows.start(p, heads, sequence, item, block, rule.negate);
        rounds = ItemRounds::count(item);
        token = ItemRounds::first_token(item);
        keys = {item.key_begin, item.key_end};
        piece.folds = p.fold_tokens != 0 && splits.count == 1 && rounds != 0 &&
                      item.key_begin / p.fold_tokens != (item.key_end - 1) / p.fold_tokens;
        piece.index = 0;
        pc_sync_block();
        if (rounds == 0) {
          piece.last = true;
          store_item(p, heads, block, i, piece, by_four, shared, stage, false);
          continue;
        }
      }

      const bool wanted = keys.meets(token + pc_warp() * Tile::kTokens, Tile::kTokens);
      ring.wait(stage, wanted);
      const bool own_tile_only = rows.sharers() == Tile::kWarps;
      if (!own_tile_only) pc_sync_block();
      for (int w = pc_warp() % rows.sharers(); rows.has_rows() && w < Tile::kWarps; w += rows.sharers()) {
        const int first = token + w * Tile::kTokens;
        if (!keys.meets(first, Tile::kTokens)) continue;
        rows.add_keys(p, rule, ring.keys(stage, w), first);
        rows.add_values(ring.values(stage, w));
      }
      token += ItemRounds::kStep;
      num_used = 1;
      piece.last = --rounds == 0;
      if (!own_tile_only) pc_sync_block();
      if (piece.last || (piece.folds && token % p.fold_tokens == 0)) {
        const GeneralExchange<kDim> exchange(shared, stage);
        rows.store(exchange.sums(pc_warp()), exchange.o(pc_warp()), rule.factor);
        pc_sync_block();
        store_item(p, heads, block, i, piece, by_four, shared, stage, true);
        pc_sync_block();
        ++piece.index;
        rows.clear();
      }
    }
  }
  clear_padding(p, heads, padding);  // nothing is on its way any more: the last groups are empty
}

}  // namespace pagecore
