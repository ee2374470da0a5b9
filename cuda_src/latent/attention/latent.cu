// Attention over latent caches by matrix instructions: multi-head latent attention with absorbed queries.
//
// All query heads attend to the same rows of kDim latent and 64 rope numbers. The whole row is the key, and its latent
// is the value, so that a row is copied once and multiplied twice. Plain rows of 16 bits, or codes that are unpacked to
// 16 bits (ring.cuh); sequences in blocks, or lists of slots. Decode, drafts and prompts.
//
// A CTA is one worker of the schedule for kRows packed rows of its items, query * heads + head: row tile x of the grid
// has rows kRows * x .. kRows * x + kRows - 1. kRows is 16 for items of few rows, or 32: a group of 4 warps for each 16
// rows. The warps of a group divide the dims of both products: warp w has 16 of every 64.
//
//               kDim + 64                      16 keys                       kDim
//             +-----------+                  +---------+                 +-----------+
//   rows      | Q         |    parts of S    | S = sum |     P           | O         |
//   of a      | registers |  --------------> | of the  |  ----------->   | registers |
//   group     +-----------+   shared memory  | 4 parts |   registers     +-----------+
//             K: shared memory,              +---------+                 V: the same rows, ldmatrix transposed
//             ldmatrix
//
// With 512 latent dims, Q takes 36 registers of a lane and O 64; two tiles of 16 rows for each warp would spill. Every
// warp of a group adds up the parts of S in the same order and computes the same weights, so that a group has one
// softmax, weights need no exchange, and no sums are exchanged at the end of an item. Two barriers for each tile: one
// before the parts are read, one before they are replaced and the stage is refilled.
//
// In flight: a ring of 4 tiles of 16 keys, of which 2 or 3 are being copied: 72 KiB for 576 numbers of 16 bits. Two
// CTAs of 16 rows fit on a multiprocessor of an H200, with 108 KiB in flight.
//
// Bytes: rows of the cache are read once for each row tile, which share them through the L2; queries once for each
// split; partial rows, float32, are written once and read once.

#include "cuda_src/latent/attention/ring.cuh"
#include "cuda_src/latent/attention/rows.cuh"

namespace pagecore {

// Processes the items of a worker. `rows` is a variable of the kernel.
template <typename Tile>
class LatentWorker {
  using ItemRounds = Rounds<Tile::kOwn, Tile::kWarps>;

 public:
  PC_MEMBER LatentWorker(const PcLatentParams& params, const Shared<pc_uint8>& shared, const WorkRange& work)
      : params_(params), shared_(shared), ring_(params, shared, work, pc_block_x() * Tile::kRows), round_(0) {
    for (int i = 0; i < Tile::kStages - 1; ++i) ring_.fill(i);
    ring_.prepare(0);
    pc_sync_block();  // fault: latent_barrier_before_first_round
  }

  // Processes item i, and joins the parts of its tile if this CTA is the last to write one.
  PC_MEMBER void process(LatentRows<Tile>& rows, int i) {
    const PcAttentionParams& p = params_.attention;
    PcWorkItem item = load_item(p.schedule, i);
    const Sequence sequence = load_sequence(p, item.sequence);
    clamp_item<Latent>(p, sequence, item);
    if (block().num_rows(item) == 0) return;
    const ScoreRule rule = make_rule<Plain>(p, 0);
    rows.open(params_, block(), sequence, item, rule.negate);
    const bool is_split = item.num_splits > 1;
    int rounds = ItemRounds::count(item), token = ItemRounds::first_token(item);
    LatentPiece piece = {false, true, 0};
    piece.folds = p.fold_tokens != 0 && !is_split && rounds != 0 &&
                  item.key_begin / p.fold_tokens != (item.key_end - 1) / p.fold_tokens;
    do {
      rows.clear();
      int left = rounds;  // of the piece
      if (piece.folds) left = min_of(left, (p.fold_tokens - token % p.fold_tokens) / Tile::kTokens);
      rounds -= left;
      PC_NO_UNROLL
      for (; left > 0; --left) {
        round(rows, rule.factor, token);
        token += Tile::kTokens;
      }
      piece.last = rounds == 0;
      rows.write(params_, block(), i, rule.factor, piece);
      ++piece.index;
    } while (rounds > 0);
    if (is_split) join(i);
  }

 private:
  PC_MEMBER static LatentBlock block(const PcLatentParams& params) {
    return {params.attention.num_query_heads, pc_block_x() * Tile::kRows, Tile::kRows};
  }
  PC_MEMBER LatentBlock block() const { return block(params_); }

  PC_MEMBER void round(LatentRows<Tile>& rows, float factor, int token) {
    ring_.fill((round_ + Tile::kStages - 1) % Tile::kStages);  // fault: latent_stage_of_this_round
    rows.multiply(ring_.tile(round_));
    ring_.prepare(round_ + 1);
    pc_sync_block();  // fault: latent_barrier_before_weights
    rows.attend(params_, factor, ring_.tile(round_), ring_.listed(round_), token);
    ++round_;
    pc_sync_block();  // fault: latent_barrier_after_round
  }

  PC_MEMBER void join(int i) const {
    const PcAttentionParams& p = params_.attention;
    PcWorkItem item = load_item(p.schedule, i);
    const Splits splits = splits_of(item);
    clamp_queries(p, item);
    join_if_last<4>(p, block(), item, splits, (shared_ + Tile::kShape.flag_begin()).template as<int>());
  }

  const PcLatentParams& params_;
  Shared<pc_uint8> shared_;
  LatentRing<Tile> ring_;
  unsigned round_;  // of all items
};

template <typename T, int kDim, int kRows, typename Format>
PC_KERNEL(pc_latent_shape(Format::kFormat, kDim, kRows).threads,
          pc_latent_shape(Format::kFormat, kDim, kRows).blocks_per_sm)
void latent(const PcLatentParams params) {
  using Tile = LatentTile<T, kDim, kRows, Format>;
  const PcAttentionParams& p = params.attention;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const WorkRange work = load_work(p.schedule, pc_block_y());
  LatentWorker<Tile> worker(params, shared, work);
  LatentRows<Tile> rows(shared);
  for (int i = work.first; i < work.end; ++i) worker.process(rows, i);
  clear_latent_padding(p);  // no copies are in flight
}

}  // namespace pagecore
