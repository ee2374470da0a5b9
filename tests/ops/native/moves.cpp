// Copy, gather, scatter and transfer of blocks; every byte of the target is compared, including gaps.
#include <limits>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "tests/ops/native/floats.hpp"
#include "tests/ops/native/hooks.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

constexpr int32_t kPlain = 5;  // a dtype that is not a float: moved as bytes

struct Type {
  int32_t dtype;
  int64_t itemsize;
};

Type float_type(Float type) { return {static_cast<int32_t>(type), size_of(type)}; }

Type any_type(Random& random) {
  if (random.one_in(2)) return float_type(random.pick(kFloats));
  return {kPlain, random.pick({1, 2, 4, 8})};
}

Type beside(Random& random, Type type) {
  return type.dtype == kPlain || random.one_in(2) ? type : float_type(random.pick(kFloats));
}

void put(Type from, const char* source, Type to, char* target) {
  if (from.dtype == to.dtype) {
    std::memcpy(target, source, static_cast<size_t>(to.itemsize));
  } else {
    narrow(static_cast<Float>(to.dtype), widen(static_cast<Float>(from.dtype), source), target);
  }
}

// Offsets of the elements within the inner axes, in index order.
std::vector<int64_t> inner_offsets(const Array& array, size_t num_outer) {
  std::vector<int64_t> offsets{0};
  for (size_t axis = num_outer; axis < array.shape().size(); ++axis) {
    std::vector<int64_t> longer;
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < array.shape(axis); ++i) longer.push_back(offset + i * array.stride(axis));
    }
    offsets = std::move(longer);
  }
  return offsets;
}

// Random bytes cover all kinds of numbers. NaN is replaced, because conversion does not keep its bits.
void spare_nan(const Array& array, Type type) {
  if (type.dtype == kPlain) return;
  const auto each = static_cast<Float>(type.dtype);
  for (const int64_t offset : inner_offsets(array, 0)) {
    if (std::isnan(widen(each, array.data() + offset))) narrow(each, 1.5, array.data() + offset);
  }
}

// The axes after block and token.
std::vector<int64_t> inner_shape(Random& random) {
  std::vector<int64_t> shape;
  for (int64_t i = random.between(0, 3); i > 0; --i) shape.push_back(random.pick({1, 2, 3, 5, 8}));
  if (!shape.empty() && random.one_in(3)) shape.back() = random.pick({32, 64, 100, 128});
  if (!shape.empty() && random.one_in(25)) random.pick(shape) = 0;
  return shape;
}

std::vector<int64_t> joined(std::vector<int64_t> first, const std::vector<int64_t>& rest) {
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
}

ArrayStyle any_style(Random& random) { return {!random.one_in(4), random.one_in(2), true}; }

// ---- between blocks and packed sequences

class Packed {
 public:
  explicit Packed(Random& random) : random_(random) {
    block_size_ = random.pick({1, 2, 5, 16});
    num_blocks_ = random.between(2, 12);
    width_ = random.between(0, 6);
    const int64_t num_rows = random.between(1, 4);
    for (int64_t row = 0; row < num_rows; ++row) blocks_.push_back(line());
    for (int64_t i = random.between(0, num_rows); i > 0; --i) {
      rows_.push_back(random.below(num_rows));
      lens_.push_back(random.between(0, width_ * block_size_));
      num_tokens_ += lens_.back();
    }
    has_rows_ = random.one_in(2);
    for (size_t i = 0; i < rows_.size() && !has_rows_; ++i) rows_[i] = static_cast<int64_t>(i);
  }

  void gather() {
    make_planes();
    std::vector<std::vector<char>> expected;
    for (const Plane& plane : planes_) {
      expected.push_back(plane.packed.memory().copy());
      visit(plane, [&](int64_t cache_at, int64_t packed_at, bool is_hole) {
        char* target = expected.back().data() + packed_at;
        if (is_hole) std::memset(target, 0, static_cast<size_t>(plane.packed_type.itemsize));
        if (!is_hole) put(plane.cache_type, plane.cache.memory().data() + cache_at, plane.packed_type, target);
      });
    }
    refuse([&](const PackedSequences& batch) { gather_blocks(caches(), packed(), batch); });
    run([&](const PackedSequences& batch) { gather_blocks(caches(), packed(), batch); });
    for (size_t i = 0; i < planes_.size(); ++i) same_bytes(planes_[i].packed, expected[i], isa());
  }

  // A block occurs in several rows here: the last write wins, plane by plane and sequence by sequence.
  void scatter() {
    make_planes();
    std::vector<std::vector<char>> expected;
    for (const Plane& plane : planes_) {
      expected.push_back(plane.cache.memory().copy());
      visit(plane, [&](int64_t cache_at, int64_t packed_at, bool is_hole) {
        const char* source = plane.packed.memory().data() + packed_at;
        if (!is_hole) put(plane.packed_type, source, plane.cache_type, expected.back().data() + cache_at);
      });
    }
    refuse([&](const PackedSequences& batch) { scatter_blocks(packed(), caches(), batch); });
    run([&](const PackedSequences& batch) { scatter_blocks(packed(), caches(), batch); });
    for (size_t i = 0; i < planes_.size(); ++i) same_bytes(planes_[i].cache, expected[i], isa());
  }

 private:
  struct Plane {
    Type cache_type, packed_type;
    Array cache, packed;
  };

  // Blocks in order, at random, or null.
  std::vector<int64_t> line() {
    std::vector<int64_t> ids;
    int64_t next = random_.below(num_blocks_);
    for (int64_t i = 0; i < width_; ++i, ++next) {
      if (random_.one_in(3)) next = random_.one_in(3) ? 0 : random_.below(num_blocks_);
      ids.push_back(next = next % num_blocks_);
    }
    return ids;
  }

  void make_planes() {
    for (int64_t i = random_.between(1, 3); i > 0; --i) {
      const std::vector<int64_t> inner = inner_shape(random_);
      const Type cache_type = any_type(random_), packed_type = beside(random_, cache_type);
      planes_.push_back({cache_type, packed_type,
                         Array(random_, joined({num_blocks_ + random_.below(2), block_size_}, inner),
                               cache_type.itemsize, any_style(random_)),
                         Array(random_, joined({num_tokens_}, inner), packed_type.itemsize, any_style(random_))});
      spare_nan(planes_.back().cache, cache_type);
      spare_nan(planes_.back().packed, packed_type);
    }
  }

  // Calls each(offset in the cache's memory, offset in the packed memory, is a hole) for every element.
  template <typename Visit>
  void visit(const Plane& plane, Visit&& each) const {
    const std::vector<int64_t> in_cache = inner_offsets(plane.cache, 2), in_packed = inner_offsets(plane.packed, 1);
    int64_t token = 0;
    for (size_t i = 0; i < lens_.size(); ++i) {
      for (int64_t position = 0; position < lens_[i]; ++position, ++token) {
        const int64_t block = blocks_[static_cast<size_t>(rows_[i])][static_cast<size_t>(position / block_size_)];
        const int64_t from = plane.cache.offset({block, position % block_size_}), to = plane.packed.offset({token});
        for (size_t k = 0; k < in_cache.size(); ++k) each(from + in_cache[k], to + in_packed[k], block == 0);
      }
    }
  }

  [[nodiscard]] std::vector<BlockArray> caches() const {
    std::vector<BlockArray> arrays;
    for (const Plane& plane : planes_) arrays.push_back(as_blocks(plane.cache, plane.cache_type.dtype));
    return arrays;
  }
  [[nodiscard]] std::vector<BlockArray> packed() const {
    std::vector<BlockArray> arrays;
    for (const Plane& plane : planes_) arrays.push_back(as_blocks(plane.packed, plane.packed_type.dtype));
    return arrays;
  }

  template <typename Call>
  void run(Call&& call) {
    const IdTable table(random_, blocks_, width_);
    const Ids lens(random_, lens_), rows(random_, rows_);
    call(
        {table.table(), lens.indices(), has_rows_ ? rows.indices() : Indices{}, block_size_, num_blocks_, num_tokens_});
  }

  // Tries each kind of wrong argument alone; nothing may be written.
  template <typename Call>
  void refuse(Call&& call) {
    std::vector<std::vector<char>> before;
    for (const Plane& plane : planes_) {
      before.push_back(plane.cache.memory().copy());
      before.push_back(plane.packed.memory().copy());
    }
    const auto refuse_one = [&](ErrorKind kind, std::vector<int64_t>& changed, int64_t value) {
      if (changed.empty()) return;
      int64_t& place = random_.pick(changed);
      const int64_t good = place;
      place = value;
      refuses(kind, __FILE__, __LINE__, [&] { run(call); });
      place = good;
    };
    for (const int64_t wrong : {int64_t{-1}, width_ * block_size_ + 1, int64_t{std::numeric_limits<int32_t>::max()}})
      refuse_one(ErrorKind::ShapeError, lens_, wrong);
    const bool had_rows = std::exchange(has_rows_, true);
    for (const int64_t wrong : {int64_t{-1}, std::ssize(blocks_), int64_t{std::numeric_limits<int32_t>::min()}})
      refuse_one(ErrorKind::InvalidSequence, rows_, wrong);
    has_rows_ = had_rows;
    for (const int64_t wrong : {int64_t{-1}, int64_t{1}}) {
      num_tokens_ += wrong;
      refuses(ErrorKind::ShapeError, __FILE__, __LINE__, [&] { run(call); });
      num_tokens_ -= wrong;
    }
    for (size_t i = 0; i < lens_.size(); ++i) {
      if (lens_[i] == 0) continue;
      int64_t& block = blocks_[static_cast<size_t>(rows_[i])][static_cast<size_t>((lens_[i] - 1) / block_size_)];
      const int64_t good = std::exchange(block, random_.pick({int64_t{-1}, num_blocks_}));
      refuses(ErrorKind::InvalidBlock, __FILE__, __LINE__, [&] { run(call); });
      block = good;
    }
    for (size_t i = 0; i < planes_.size(); ++i) {
      same_bytes(planes_[i].cache, before[2 * i], "a refused move wrote");
      same_bytes(planes_[i].packed, before[2 * i + 1], "a refused move wrote");
    }
  }

  Random& random_;
  int64_t block_size_, num_blocks_, width_, num_tokens_ = 0;
  bool has_rows_ = false;
  std::vector<std::vector<int64_t>> blocks_;
  std::vector<int64_t> rows_, lens_;
  std::vector<Plane> planes_;
};

// ---- between blocks

void move_block(const Array& source, Type from, int64_t source_block, std::vector<char>& target_bytes,
                const Array& target, Type to, int64_t target_block) {
  const std::vector<int64_t> in_source = inner_offsets(source, 1), in_target = inner_offsets(target, 1);
  for (size_t k = 0; k < in_source.size(); ++k) {
    put(from, source.at({source_block}) + in_source[k], to,
        target_bytes.data() + target.offset({target_block}) + in_target[k]);
  }
}

void transfer_some(Random& random) {
  const int64_t num_sources = random.between(2, 9), num_targets = random.between(2, 9);
  std::vector<int64_t> from_ids, to_ids;
  for (int64_t i = random.between(0, 8); i > 0; --i) {
    const bool goes_on = !from_ids.empty() && !random.one_in(3);
    from_ids.push_back(goes_on && from_ids.back() + 1 < num_sources ? from_ids.back() + 1
                                                                    : random.between(1, num_sources - 1));
    to_ids.push_back(goes_on && to_ids.back() + 1 < num_targets ? to_ids.back() + 1
                                                                : random.between(1, num_targets - 1));
  }
  std::vector<Array> sources, targets;
  std::vector<Type> from, to;
  std::vector<BlockArray> source_arrays, target_arrays;
  std::vector<std::vector<char>> expected, before;
  for (int64_t i = random.between(1, 3); i > 0; --i) {
    const std::vector<int64_t> inner = joined({random.pick({1, 2, 5, 16})}, inner_shape(random));
    from.push_back(any_type(random));
    to.push_back(beside(random, from.back()));
    sources.emplace_back(random, joined({num_sources + random.below(2)}, inner), from.back().itemsize,
                         any_style(random));
    targets.emplace_back(random, joined({num_targets + random.below(2)}, inner), to.back().itemsize, any_style(random));
    spare_nan(sources.back(), from.back());
    source_arrays.push_back(as_blocks(sources.back(), from.back().dtype));
    target_arrays.push_back(as_blocks(targets.back(), to.back().dtype));
    before.push_back(targets.back().memory().copy());
    expected.push_back(before.back());
    for (size_t k = 0; k < from_ids.size(); ++k)
      move_block(sources.back(), from.back(), from_ids[k], expected.back(), targets.back(), to.back(), to_ids[k]);
  }
  int64_t least_sources = std::numeric_limits<int64_t>::max(), least_targets = least_sources;
  for (const BlockArray& array : source_arrays) least_sources = std::min(least_sources, array.num_blocks);
  for (const BlockArray& array : target_arrays) least_targets = std::min(least_targets, array.num_blocks);
  for (int side = 0; side < 2 && !from_ids.empty(); ++side) {
    std::vector<int64_t> wrong = side == 0 ? from_ids : to_ids;
    wrong.back() = random.pick({int64_t{-1}, int64_t{0}, side == 0 ? least_sources : least_targets});
    const Ids from_wrong(random, side == 0 ? wrong : from_ids), to_wrong(random, side == 0 ? to_ids : wrong);
    PC_REFUSES(InvalidBlock, transfer_blocks(source_arrays, target_arrays, from_wrong.indices(), to_wrong.indices()));
  }
  for (size_t i = 0; i < targets.size(); ++i) same_bytes(targets[i], before[i], "a refused transfer wrote");
  const Ids from_indices(random, from_ids), to_indices(random, to_ids);
  transfer_blocks(source_arrays, target_arrays, from_indices.indices(), to_indices.indices());
  for (size_t i = 0; i < targets.size(); ++i) same_bytes(targets[i], expected[i], isa());
}

void copy_some(Random& random) {
  const int64_t num_blocks = random.between(1, 8);
  std::vector<int64_t> from_ids, to_ids;
  for (int64_t i = random.between(0, 8); i > 0; --i) {
    from_ids.push_back(random.below(num_blocks));
    to_ids.push_back(random.below(num_blocks));
  }
  std::vector<Array> caches;
  std::vector<BlockArray> arrays;
  std::vector<std::vector<char>> expected, before;
  for (int64_t i = random.between(1, 3); i > 0; --i) {
    const Type type = any_type(random);
    caches.emplace_back(random, joined({num_blocks}, inner_shape(random)), type.itemsize, any_style(random));
    arrays.push_back(as_blocks(caches.back(), type.dtype));
    const Array& cache = caches.back();
    before.push_back(cache.memory().copy());
    expected.push_back(before.back());
    const std::vector<int64_t> offsets = inner_offsets(cache, 1);
    for (size_t k = 0; k < from_ids.size(); ++k) {
      for (const int64_t offset : offsets) {
        std::memcpy(expected.back().data() + cache.offset({to_ids[k]}) + offset,
                    expected.back().data() + cache.offset({from_ids[k]}) + offset, static_cast<size_t>(type.itemsize));
      }
    }
  }
  for (int side = 0; side < 2 && !from_ids.empty(); ++side) {
    std::vector<int64_t> wrong = side == 0 ? from_ids : to_ids;
    wrong.back() = random.pick({int64_t{-1}, num_blocks});
    const Ids from_wrong(random, side == 0 ? wrong : from_ids), to_wrong(random, side == 0 ? to_ids : wrong);
    PC_REFUSES(InvalidBlock, copy_blocks(arrays, from_wrong.indices(), to_wrong.indices()));
  }
  for (size_t i = 0; i < caches.size(); ++i) same_bytes(caches[i], before[i], "a refused copy wrote");
  const Ids from_indices(random, from_ids), to_indices(random, to_ids);
  copy_blocks(arrays, from_indices.indices(), to_indices.indices());
  for (size_t i = 0; i < caches.size(); ++i) same_bytes(caches[i], expected[i], "copy");
}

}  // namespace

PC_TEST(gather_and_scatter_follow_the_block_table) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(120, [](Random& random) {
      hooks.streams = random.one_in(2);
      Packed(random).gather();
      Packed(random).scatter();
    });
  }
  hooks = {};
  set_isa("");
}

PC_TEST(transfer_moves_blocks_between_layouts_and_dtypes) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(120, [](Random& random) {
      hooks.streams = random.one_in(2);
      transfer_some(random);
    });
  }
  hooks = {};
  set_isa("");
}

PC_TEST(copy_moves_blocks_in_the_order_of_the_pairs) { rounds(400, copy_some); }
