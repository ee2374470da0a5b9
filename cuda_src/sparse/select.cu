// Selection of positions by score: the first, the last and the best ones of a row, or the best ones in their order.
//
//   row       | sinks | candidates, of which the best `budget` are selected | recent |
//
// A block of threads has one row at a time. It finds the cut (select_cut.cuh), and then numbers the selected candidates
// in ascending order:
//
//   512 threads    | warp 0: 128 candidates | warp 1 | ...     2,048 candidates at a time; a ballot for each 32
//
// Of equal scores at the cut the first are selected. A ranked selection keeps pairs of key and inverted position in
// shared memory and sorts them by a bitonic network. Results depend on no order of threads. Bytes: a row of up to 8,192
// scores is read once, a longer one three times, and five times if more than 8,192 scores share the first digit.
#include "cuda_src/device/units.cuh"
#include "cuda_src/sparse/select_cut.cuh"

namespace pagecore {

constexpr int kCutEach = 4;  // candidates of a lane at a time
constexpr int kCutTogether = kCutEach * PC_SELECT_THREADS;

// The candidates of a row before a stretch that are better than the cut, and that are equal to it.
struct CutRank {
  int above;
  int equal;
};

// The target of a row: positions in device memory, or pairs to be sorted.
struct SelectTarget {
  Global<int> positions;
  Shared<pc_uint64> pairs;
  bool ranked;
  int first;  // position of the first candidate

  PC_MEMBER void store(int rank, pc_uint32 key, int candidate) const {
    const int position = first + candidate;
    if (ranked) {
      pairs.store(rank, static_cast<pc_uint64>(key) << 32 | ~static_cast<pc_uint32>(position));
    } else {
      positions.store(rank, position);
    }
  }
};

// Stores the candidates first .. first + kCutTogether - 1 that the cut selects; `rank` counts those before.
PC_DEVICE CutRank take_stretch(const SelectShared& shared, const SelectKeys& keys, const Cut& cut, int first,
                               const CutRank& rank, const SelectTarget& target, int turn) {
  const int begin = first + pc_warp() * 32 * kCutEach + pc_lane();
  pc_uint32 key[kCutEach], above[kCutEach], equal[kCutEach];
  int own_above = 0, own_equal = 0;
  PC_UNROLL
  for (int k = 0; k < kCutEach; ++k) key[k] = begin + 32 * k < keys.count ? keys.at(begin + 32 * k) : 0;
  PC_UNROLL
  for (int k = 0; k < kCutEach; ++k) {
    above[k] = pc_ballot(key[k] > cut.key);
    equal[k] = pc_ballot(key[k] == cut.key && key[k] != 0);
    own_above += pc_count_bits(above[k]);
    own_equal += pc_count_bits(equal[k]);
  }
  // Two sets of counts take turns, so that one barrier suffices.
  const Shared<int> counts = shared.words + turn * (PC_SELECT_THREADS / 32);
  if (pc_lane() == 0) counts.store(pc_warp(), own_above << 16 | own_equal);
  pc_sync_block();  // fault: select_barrier_after_counts
  CutRank before = rank, after = rank;
  for (int w = 0; w < PC_SELECT_THREADS / 32; ++w) {
    if (w == pc_warp()) before = after;
    const int both = counts.load(w);
    after.above += both >> 16;
    after.equal += both & 0xffff;
  }
  PC_UNROLL
  for (int k = 0; k < kCutEach; ++k) {
    const pc_uint32 lower = (1u << pc_lane()) - 1;
    const int equal_before = before.equal + pc_count_bits(equal[k] & lower);
    const bool ties = (equal[k] >> pc_lane() & 1) != 0 && equal_before < cut.equal;
    if ((above[k] >> pc_lane() & 1) != 0 || ties) {
      const int at = before.above + pc_count_bits(above[k] & lower) + min_of(equal_before, cut.equal);
      target.store(at, key[k], begin + 32 * k);
    }
    before.above += pc_count_bits(above[k]);
    before.equal += pc_count_bits(equal[k]);
  }
  return after;
}

// Selects the best `budget` candidates; returns their number.
PC_DEVICE int take_best(const SelectShared& shared, SelectKeys& keys, int budget, const SelectTarget& target) {
  const Cut cut = find_cut(shared, keys, budget);
  pc_sync_block();  // fault: select_barrier_before_counts
  CutRank rank = {0, 0};
  int turn = 0;
  for (int first = 0; first < keys.count && rank.above + min_of(rank.equal, cut.equal) < budget;
       first += kCutTogether, turn ^= 1) {
    rank = take_stretch(shared, keys, cut, first, rank, target, turn);
  }
  return rank.above + min_of(rank.equal, cut.equal);
}

// Sorts the pairs 0 .. count - 1, the largest first.
PC_DEVICE void sort_pairs(const Shared<pc_uint64>& pairs, int count) {
  int size = 1;
  while (size < count) size *= 2;
  for (int i = count + pc_thread(); i < size; i += pc_num_threads()) pairs.store(i, 0);
  pc_sync_block();  // fault: select_barrier_before_sorting
  for (int run = 2; run <= size; run *= 2) {
    for (int gap = run / 2; gap > 0; gap /= 2) {
      for (int i = pc_thread(); i < size / 2; i += pc_num_threads()) {
        const int low = i / gap * 2 * gap + i % gap, high = low + gap;
        const pc_uint64 a = pairs.load(low), b = pairs.load(high);
        const bool descends = (low & run) == 0;
        if ((a < b) != descends) continue;
        pairs.store(low, b);
        pairs.store(high, a);
      }
      pc_sync_block();  // fault: select_barrier_in_sorting
    }
  }
}

PC_DEVICE int take_range(const Global<int>& positions, int begin, int end) {
  for (int i = begin + pc_thread(); i < end; i += pc_num_threads()) positions.store(i - begin, i);
  return end > begin ? end - begin : 0;
}

PC_DEVICE int select_row(const PcSelectParams& p, const SelectShared& shared, const Global<float>& scores,
                         const Global<int>& positions, int length) {
  if (length < p.threshold) return take_range(positions, 0, length);
  const int first = min_of(p.sinks, length), last = max_of(length - p.recent, first);
  int taken = take_range(positions, 0, first);
  if (p.budget > 0 && first < last) {
    SelectKeys keys = {scores + first, shared.held, last - first, false};
    const SelectTarget target = {positions + taken, shared.pairs, p.ranked != 0, first};
    const int best = take_best(shared, keys, p.budget, target);
    if (p.ranked != 0) {
      sort_pairs(shared.pairs, best);
      for (int i = pc_thread(); i < best; i += pc_num_threads()) {
        positions.store(i, static_cast<int>(~static_cast<pc_uint32>(shared.pairs.load(i))));
      }
    }
    taken += best;
  }
  return taken + take_range(positions + taken, last, length);
}

// Grid: rows, in steps of the axis.
PC_KERNEL(PC_SELECT_THREADS, 2) void select(const PcSelectParams p) {
  const SelectShared shared(pc_shared_buffer());
  for (int row = pc_block_x(); row < p.num_rows; row += pc_num_blocks_x()) {
    int length = p.length;
    if (p.lens.data != 0) length = clamp(load_index(p.lens, divide(row, p.rows_per_length)), 0, p.width);
    const Global<int> positions = Global<int>(p.positions) + static_cast<pc_int64>(row) * p.capacity;
    const int taken = select_row(p, shared, Global<float>(p.scores) + row * p.score_stride, positions, length);
    for (int i = taken + pc_thread(); i < p.capacity; i += pc_num_threads()) positions.store(i, -1);
    if (p.counts != 0 && pc_thread() == 0) Global<int>(p.counts).store(row, taken);
  }
}

}  // namespace pagecore
