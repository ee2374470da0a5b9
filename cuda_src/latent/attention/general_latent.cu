// Attention over latent caches in float32 by fused multiply-adds: every call that latent.cu does not serve.
//
// Latents of up to pc_max_general_latent numbers, rope of any dim, queries and rows of different types, rows that are
// not aligned, every format. A CTA is one worker of the schedule for 8 packed rows of its items, query * heads + head:
// row tile x of the grid has rows 8 * x .. 8 * x + 7.
//
//               latent | rope                 8 keys                      latent
//             +--------------+             +---------+              +--------------------+
//   8 rows    | Q: shared    |             | S       |              | O: registers, four |
//             +--------------+             +---------+              | adjacent dims of a |
//   8 keys    | K: shared    |         two threads a product        | thread, or twice   |
//             +--------------+             softmax: warp w          | four               |
//                                          has rows 2 w, 2 w + 1    +--------------------+
//
// In flight: nothing is copied ahead, so that every dtype and dim takes one path. Elements are widened to float32 when
// they are stored in shared memory.
//
// Bytes: rows of the cache are read once for each row tile; partial rows are written once and read once.

#include "cuda_src/latent/attention/fold.cuh"
#include "cuda_src/latent/attention/ring.cuh"

namespace pagecore {

// Returns number `d` of a row of the cache, whose rope begins at `latent_dim`.
PC_DEVICE float latent_number(const PcLatentParams& params, pc_address latent, pc_address rope, int d) {
  const int rope_d = d - params.attention.value_dim;
  const bool is_rope = rope_d >= 0;
  if (params.format == PC_LATENT_PLAIN) {
    return is_rope ? load_float(params.attention.value_type, rope, rope_d)
                   : load_float(params.attention.key_type, latent, d);
  }
  const Global<pc_uint8> row(latent);
  if (params.format == PC_LATENT_E4M3)
    return float_of_e4m3(is_rope ? Global<pc_uint8>(rope).load(rope_d) : row.load(d));
  if (params.format == PC_LATENT_FP8_DS) {
    if (is_rope) return load_float(PC_BFLOAT16, latent + PC_FP8_ROPE, rope_d);
    const float scale = Global<float>(latent + PC_FP8_SCALES).load(d / 128);
    return pc_to_float(pc_from_float<pc_bfloat16>(float_of_e4m3(row.load(d)) * scale));
  }
  if (is_rope) return float_of_e4m3(row.load(PC_NVFP4_ROPE + rope_d));
  const int group = d / 16;
  const float scale = float_of_e4m3(row.load(PC_NVFP4_SCALES + 8 * (group % 4) + group / 4));
  return low_half(halves_of_e2m1(static_cast<pc_uint32>(row.load(d / 2)) >> 4 * (d % 2))) * scale;
}

// The rows of a CTA.
class GeneralLatent {
  static constexpr int kRows = PcGeneralLatentShape::kRows;
  static constexpr int kTokens = PcGeneralLatentShape::kTokens;
  static constexpr int kThreads = PcGeneralLatentShape::kThreads;
  static constexpr int kVectors = pc_max_general_latent / (4 * kThreads);  // of four dims of O, of a thread

 public:
  PC_MEMBER explicit GeneralLatent(const PcLatentParams& params)
      : params_(params),
        shape_{params.attention.value_dim, params.rope_dim},
        shared_(pc_shared_buffer()),
        rule_(make_rule<Plain>(params.attention, 0)) {}

  PC_MEMBER void process(int i) {
    const PcAttentionParams& p = params_.attention;
    PcWorkItem item = load_item(p.schedule, i);
    const Splits splits = splits_of(item);
    const Sequence sequence = load_sequence(p, item.sequence);
    clamp_item<Latent>(p, sequence, item);
    const int rows = block().num_rows(item);
    if (rows == 0) return;
    load_queries(item, rows);
    if (pc_thread() < kRows) {
      KeyRange keys =
          item_keys<Latent>(p, sequence, item, sequence.position(item.query_begin + block().query(pc_thread())));
      if (pc_thread() >= rows) keys.end = keys.begin;
      ranges().store(pc_thread(), keys);
    }
    LatentPiece piece = {p.fold_tokens != 0 && splits.count == 1, true, 0};
    int token = item.key_begin;
    do {
      int stop = item.key_end;
      if (piece.folds) stop = min_of(stop, (token / p.fold_tokens + 1) * p.fold_tokens);
      clear();
      for (; token < stop; token = (token / kTokens + 1) * kTokens) attend(sequence, {item.key_begin, stop}, token);
      token = stop;
      piece.last = token >= item.key_end;
      piece.folds = piece.folds && (piece.index > 0 || !piece.last);
      write(item, splits, piece, rows);
      ++piece.index;
    } while (!piece.last);
    if (splits.count > 1) join_if_last<1>(p, block(), item, splits, (shared_ + shape_.flag_begin()).as<int>());
    pc_sync_block();  // fault: general_latent_barrier_after_item
  }

 private:
  PC_MEMBER LatentBlock block() const { return {params_.attention.num_query_heads, pc_block_x() * kRows, kRows}; }
  PC_MEMBER Shared<float> queries() const { return shared_.as<float>(); }
  PC_MEMBER Shared<float> keys() const { return (shared_ + shape_.keys_begin()).as<float>(); }
  PC_MEMBER Shared<pc_address> slots() const { return (shared_ + shape_.slots_begin()).as<pc_address>(); }
  PC_MEMBER Shared<float> weights() const { return (shared_ + shape_.weights_begin()).as<float>(); }
  PC_MEMBER Shared<float> rescales() const { return (shared_ + shape_.rescale_begin()).as<float>(); }
  PC_MEMBER Shared<float> sums() const { return (shared_ + shape_.sums_begin()).as<float>(); }
  PC_MEMBER Shared<float> folds() const { return (shared_ + shape_.folds_begin()).as<float>(); }
  PC_MEMBER Shared<KeyRange> ranges() const { return (shared_ + shape_.ranges_begin()).as<KeyRange>(); }

  PC_MEMBER void clear() {
    top_ = -pc_infinity();
    sum_ = 0.0f;
    PC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PC_UNROLL
      for (int k = 0; k < 4 * kVectors; ++k) o_[r][k] = 0.0f;
    }
  }

  // Returns the number of the row at element d in shared memory, or -1 in the padding.
  PC_MEMBER int number_of(int d) const {
    const int rope = d - shape_.rope_begin();
    if (rope < 0) return d < shape_.latent_dim ? d : -1;
    return rope < shape_.rope_dim ? shape_.latent_dim + rope : -1;
  }

  PC_MEMBER void load_queries(const PcWorkItem& item, int rows) const {
    const PcAttentionParams& p = params_.attention;
    for (int at = pc_thread(); at < kRows * shape_.pitch(); at += kThreads) {
      const int row = at / shape_.pitch(), d = number_of(at % shape_.pitch());
      float x = 0.0f;
      if (row < rows && d >= 0) {
        const int query_row = item.query_begin + block().query(row), head = block().head(row);
        x = d < shape_.latent_dim ? load_float(p.query_type, p.query.data, row_offset(p.query, query_row, head) + d)
                                  : load_float(p.query_type, params_.query_rope.data,
                                               row_offset(params_.query_rope, query_row, head) + d - shape_.latent_dim);
      }
      queries().store(at, rule_.negate ? -x : x);
    }
  }

  // Processes the tokens of the tile of `token` that are in `range`.
  PC_MEMBER void attend(const Sequence& sequence, const KeyRange& range, int token) {
    const int first = token / kTokens * kTokens;
    load_slots(sequence, range, first);
    pc_sync_block();  // fault: general_latent_barrier_before_keys
    for (int at = pc_thread(); at < kTokens * shape_.pitch(); at += kThreads) {
      const int t = at / shape_.pitch(), d = number_of(at % shape_.pitch());
      const pc_address latent = slots().load(2 * t);
      keys().store(at, latent == 0 || d < 0 ? 0.0f : latent_number(params_, latent, slots().load(2 * t + 1), d));
    }
    pc_sync_block();  // fault: general_latent_barrier_after_keys
    const float score = multiply(pc_thread() % kRows, pc_thread() / kRows % kTokens);
    softmax(score, range, first);
    pc_sync_block();  // fault: general_latent_barrier_before_values
    accumulate();
  }

  // Addresses of the latents and of the ropes of the tokens; 0 for tokens that the range or a list does not have.
  PC_MEMBER void load_slots(const Sequence& sequence, const KeyRange& range, int first) const {
    const PcAttentionParams& p = params_.attention;
    if (pc_thread() >= kTokens) return;
    const int token = first + pc_thread();
    pc_address latent = 0, rope = 0;
    if (range.has(token)) {
      const PendingSlot pending = begin_slot(p, sequence.table_row, token);
      const bool listed = pending.block.high == 0 && static_cast<int>(pending.block.low) >= 0;
      Slot slot = pending.get(p);
      if (params_.sparse != 0) {
        const int block = divide(slot.block, params_.block);
        slot = {block, slot.block - block * params_.block.divisor};
      }
      if (params_.sparse == 0 || listed) latent = (Global<pc_uint8>(p.key.data) + slot_offset(p.key, slot)).address();
      rope = (Global<pc_uint8>(p.value.data) + slot_offset(p.value, slot)).address();
    }
    slots().store(2 * pc_thread(), latent);
    slots().store(2 * pc_thread() + 1, rope);
  }

  // Returns the product of a row and a token. Each of the two threads of a product, 64 apart, multiplies every other
  // vector of four dims; the sum goes through shared memory.
  PC_MEMBER float multiply(int row, int t) const {
    const int half = pc_thread() / (kRows * kTokens), vectors = (shape_.pitch() - 4) / 4;
    float sum = 0.0f;
    for (int v = half; v < vectors; v += 2) {
      const pc_vector q = queries().load_vector(row * shape_.pitch() + 4 * v);
      const pc_vector k = keys().load_vector(t * shape_.pitch() + 4 * v);
      PC_UNROLL
      for (int i = 0; i < 4; ++i) sum = pc_fma(pc_bits_to_float(q.word[i]), pc_bits_to_float(k.word[i]), sum);
    }
    if (half == 1) weights().store(t * kRows + row, sum);
    pc_sync_block();  // fault: general_latent_barrier_before_sum
    return half == 1 ? sum : sum + weights().load(t * kRows + row);
  }

  // Replaces scores by weights. A warp of the first half has the 8 rows of 4 tokens; the largest score of a row goes
  // through shared memory. A negative weight marks a key that the row does not attend to; its value may be anything.
  PC_MEMBER void softmax(float score, const KeyRange& range, int first) {
    const int row = pc_thread() % kRows, t = pc_thread() / kRows % kTokens;
    const bool attended = range.has(first + t) && ranges().load(row).has(first + t) && slots().load(2 * t) != 0;
    if (pc_thread() < kRows * kTokens) weights().store(t * kRows + row, attended ? score : -pc_infinity());
    pc_sync_block();  // fault: general_latent_barrier_before_softmax
    // Every thread keeps the state of the row thread % 8.
    float top = top_;
    PC_UNROLL
    for (int k = 0; k < kTokens; ++k) top = pc_max(top, weights().load(k * kRows + row));
    const float origin = -rule_.factor * finite_or_zero(top);
    const float rescale = top == top_ ? 1.0f : pc_exp2(pc_fma(rule_.factor, top_, origin));
    float sum = 0.0f;
    PC_UNROLL
    for (int k = 0; k < kTokens; ++k) sum += pc_exp2(pc_fma(rule_.factor, weights().load(k * kRows + row), origin));
    const float weight = pc_exp2(pc_fma(rule_.factor, weights().load(t * kRows + row), origin));
    top_ = top;
    sum_ = pc_fma(sum_, rescale, sum);
    pc_sync_block();  // fault: general_latent_barrier_before_weights
    if (pc_thread() < kRows * kTokens) weights().store(t * kRows + row, attended ? weight : -1.0f);
    if (pc_thread() < kRows) rescales().store(pc_thread(), rescale);
  }

  PC_MEMBER void accumulate() {
    PC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float rescale = rescales().load(r);
      PC_UNROLL
      for (int k = 0; k < 4 * kVectors; ++k) o_[r][k] *= rescale;
    }
    PC_NO_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      PC_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        const int d = 4 * (n * kThreads + pc_thread());
        if (d >= shape_.latent_dim) break;
        const pc_vector v = keys().load_vector(t * shape_.pitch() + d);
        PC_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const float weight = weights().load(t * kRows + r);
          if (weight < 0.0f) continue;
          PC_UNROLL
          for (int k = 0; k < 4; ++k) o_[r][4 * n + k] = pc_fma(weight, pc_bits_to_float(v.word[k]), o_[r][4 * n + k]);
        }
      }
    }
  }

  // Writes the rows after the last key of the item or of a piece. A thread writes its own dims.
  PC_MEMBER void write(const PcWorkItem& item, const Splits& splits, const LatentPiece& piece, int rows) const {
    const PcAttentionParams& p = params_.attention;
    if (pc_thread() < kRows) {
      sums().store(2 * pc_thread(), top_);
      sums().store(2 * pc_thread() + 1, sum_);
    }
    pc_sync_block();  // fault: general_latent_barrier_before_rows
    PC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      const LatentRowEnd end(params_, block(), item, splits, piece, r, sums().load(2 * r) * rule_.factor,
                             sums().load(2 * r + 1), folds(), kRows, pc_thread() == 0);
      PC_UNROLL
      for (int k = 0; k < 4 * kVectors; ++k) {
        const int d = 4 * (k / 4 * kThreads + pc_thread()) + k % 4;
        if (d < shape_.latent_dim) {
          const float before = end.has_before() ? Global<float>(p.partial_out).load(end.kept + d) : 0.0f;
          store_float(end.target.type, end.target.data, end.target.first + d, end.value(o_[r][k], before));
        }
      }
      if (pc_thread() == 0) end.target.store_lse(end.lse);
    }
  }

  const PcLatentParams& params_;
  PcGeneralLatentShape shape_;
  Shared<pc_uint8> shared_;
  ScoreRule rule_;
  float top_, sum_;  // of the row thread % 8
  float o_[kRows][4 * kVectors];
};

PC_KERNEL(PcGeneralLatentShape::kThreads, 2)
void general_latent(const PcLatentParams params) {
  const PcAttentionParams& p = params.attention;
  const WorkRange work = load_work(p.schedule, pc_block_y());
  GeneralLatent rows(params);
  for (int i = work.first; i < work.end; ++i) rows.process(i);
  clear_latent_padding(p);
}

}  // namespace pagecore
