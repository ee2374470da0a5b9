// Attention of few queries over many keys: 16-bit caches, dims that are multiples of 8, up to 256.
//
// An instance computes with kDim dims of keys and kValueDim of values (pc_matrix_dims); dims past those of the call are
// zeros that are never read from the cache (tile_rows.cuh), and are not written to the output.
//
// A CTA is one worker of the schedule for one key head. Its items have at most 16 packed rows, query * heads + head:
// the left operand of m16n8k16, so that keys and values are read once for all query heads that share them.
//
//               16 keys of a warp's tile
//             +--------------------------+
//   16 rows   |  S = Q K^T               |   Q   shared memory, all item long, ldmatrix
//             +--------------------------+   K   shared memory, ldmatrix
//                                            S   registers: 2 fragments, weights are repacked as left operand
//               kValueDim
//             +--------------------------+   V   shared memory, ldmatrix transposed
//   16 rows   |  O += P V                |   O   registers, kValueDim / 8 fragments
//             +--------------------------+
//
// Warps take tiles in turn (tile_walk.cuh), each with a running softmax of its own, and meet only when an item ends:
// sums and O go through shared memory, O into the stage that was used up last.
//
// Copies: every warp has a ring of `stages` tiles, each of 16 keys and 16 values. A stage is filled again as soon as it
// is used up, across the ends of items. A CTA's rings are of 64 to 80 KiB (pc_decode_ring), so that two CTAs have 128
// KiB in flight on a multiprocessor of an H200: 3.5 times its share of 4.8 TB/s in a microsecond, and enough while one
// of the two ends an item. With padded dims less is in flight: 80 KiB, 2.2 times, for head dim 80. The table is looked
// up one tile before its slots are needed.
//
// Shared memory: rows of keys, values and queries have their 16-byte chunks permuted (tile_rows.cuh). A row of O has
// its groups of 8 numbers permuted alike, by r % 4.
//
// Bytes: keys and values once; queries once for each split; partial rows, float32, once written and once read.

#include "decode_ring.cuh"
#include "decode_rows.cuh"

namespace pagecore {

// The rows of item i, whose keys have all been seen: the output itself, or the item's part of it. Where it has no keys
// nothing has been exchanged. What the rounds do without is read again rather than kept in registers.
template <typename Tile>
PC_DEVICE void store_rows(const PcAttentionParams& p, const Heads& heads, int i, const DecodeExchange<Tile>& exchange,
                          bool has_keys) {
  constexpr int kVectors = Tile::kValues / 4;  // of a row; those past value_dim are padding
  PcWorkItem item = load_item(p.schedule, i);
  const Splits splits = splits_of(item);
  fit_queries(p, item);
  const bool whole = splits.count == 1;
  const float value_scale = whole ? load_number(p.value_scale, heads.kv, 1.0f) : 1.0f;
  const int tasks = item.query_count * heads.count * kVectors;
  for (int task = pc_thread(); task < tasks; task += pc_num_threads()) {
    const int row = task / kVectors, d = task % kVectors * 4;
    if (d >= p.value_dim) continue;
    const int query = row / heads.count, head = heads.first + row % heads.count;
    typename DecodeExchange<Tile>::Sums sums = {-pc_infinity(), 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
    if (has_keys) sums = exchange.load(row, d);
    const RowEnd end = end_row(sums.top, sums.sum, whole ? load_sink(p, head) : -pc_infinity());
    PC_UNROLL
    for (int k = 0; k < 4; ++k) sums.x[k] *= end.factor * value_scale;
    const int query_row = item.query_begin + query;
    if (whole) {
      store_floats<4>(p.query_type, p.out.data, row_offset(p.out, query_row, head) + d, sums.x);
      if (d == 0) store_lse(p, query_row, head, end.lse);
    } else {
      store_partial<4>(p, splits.row(query), head, d, sums.x);
      if (d == 0) store_partial_lse(p, splits.row(query), head, end.lse);
    }
  }
}

// Joins the parts of item i's tile where this CTA was the last of them.
PC_DEVICE void join_item(const PcAttentionParams& p, const Heads& heads, int i, const Shared<int>& flag) {
  PcWorkItem item = load_item(p.schedule, i);
  const Splits splits = splits_of(item);
  fit_queries(p, item);
  if (splits.count > 1) join_if_last<4>(p, heads, item, splits, flag);
}

template <typename T, int kDim, typename Options, int kValueDim = kDim>
PC_KERNEL(pc_decode_shape(kDim, kValueDim).threads, pc_decode_shape(kDim, kValueDim).blocks_per_sm)
void decode(const PcAttentionParams p) {
  using Tile = DecodeTile<T, kDim, kValueDim>;
  using ItemRounds = Rounds<Tile::kTokens, Tile::kWarps>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const int padding = first_padding_row(p);
  const WorkRange work = load_work(p.schedule, pc_block_x());
  DecodeRing<Tile> ring(p, shared, heads, work);
  const ScoreRule rule = make_rule<Options>(p, heads.kv);
  DecodeRows<Tile, Options> rows(shared);

  // A pass of this loop is one round of an item, or an item without keys.
  int i = work.first - 1, rounds = 0, token = 0, num_rows = 0;
  KeyRange keys = {0, 0};
  int stage = 0, num_used = Tile::kStages;  // stages that can be filled: this one and those behind it
  while (true) {
    for (; num_used > 0; --num_used) {
      ring.fill(p, stage);
      stage = Tile::next(stage);
    }
    // All stages are on their way, and `stage` is the oldest.
    if (rounds == 0) {
      if (i >= work.first) join_item(p, heads, i, (shared + Tile::kRing.flag_begin()).template as<int>());
      if (++i >= work.end) break;
      PcWorkItem item = load_item(p.schedule, i);
      const Sequence sequence = load_sequence(p, item.sequence);
      fit_item(p, sequence, item);
      rows.start(p, heads, sequence, item, rule.negate);
      rounds = ItemRounds::count(item);
      token = ItemRounds::first_token(item) + pc_warp() * Tile::kTokens;
      keys = {item.key_begin, item.key_end};
      num_rows = item.query_count * heads.count;
      pc_sync_block();
      if (rounds == 0) {
        store_rows<Tile>(p, heads, i, DecodeExchange<Tile>(shared, stage), false);
        continue;
      }
    }

    ring.wait();
    if (keys.meets(token, Tile::kTokens)) {
      rows.add_keys(p, rule, ring.keys(stage), token);
      rows.add_values(p, ring.values(stage), token);
    }
    token += ItemRounds::kStep;
    num_used = 1;
    if (--rounds == 0) {
      const DecodeExchange<Tile> exchange(shared, stage);
      rows.complete();
      pc_sync_warp();
      exchange.store(rows, rule.factor, num_rows);
      pc_sync_block();
      store_rows<Tile>(p, heads, i, exchange, true);
      pc_sync_block();
    }
  }
  clear_padding(p, heads, padding);  // nothing is on its way any more: the last groups are empty
}

}  // namespace pagecore
