// Overlap of strided arrays: two arrays that share bytes, and elements of one array that share bytes.
//
// Disjoint slices of one array are recognised without a search even if they interleave: modulo one of their strides,
// each occupies a separate range. Other layouts take an exact search. A search that exceeds kMaxSteps reports overlap.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "pagecore/arrays/views/array_view.hpp"
#include "pagecore/native/rounding.hpp"

namespace pagecore {

// The layout of an array, with pointers to the owner's shape and strides; strides are in bytes.
struct Layout {
  const char* data;
  int64_t item;
  int ndim;
  const int64_t* shape;
  const int64_t* strides;
};

// An array with nonnegative strides. Its items are at low + sum(index[i] * axes[i].stride), index[i] < axes[i].count.
// Counts are at least 2. An array without elements has end == low.
struct Strided {
  struct Axis {
    int64_t stride;
    int64_t count;
  };

  int64_t low;
  int64_t end;
  int64_t item;
  int num_axes = 0;
  Axis axes[kMaxDims];

  explicit Strided(const Layout& layout)
      : low(static_cast<int64_t>(reinterpret_cast<uintptr_t>(layout.data))), end(low), item(layout.item) {
    if (element_count(layout.ndim, layout.shape) == 0) return;
    end = low + item;
    for (int i = 0; i < layout.ndim; ++i) {
      if (layout.shape[i] < 2) continue;
      const int64_t stride = std::llabs(layout.strides[i]), reach = (layout.shape[i] - 1) * stride;
      axes[num_axes++] = {stride, layout.shape[i]};
      if (layout.strides[i] < 0) {
        low -= reach;
      } else if (__builtin_add_overflow(end, reach, &end)) {
        end = std::numeric_limits<int64_t>::max();
      }
    }
  }

  // True if sums of offsets could overflow int64. No real memory spans 2^60 bytes.
  [[nodiscard]] bool is_beyond_memory() const { return end - low > int64_t{1} << 60 || end < low; }

  // Bytes from the first to the last item modulo `period`. An axis whose stride is a multiple of it adds nothing.
  [[nodiscard]] int64_t span_within(int64_t period) const {
    int64_t span = item;
    for (int i = 0; i < num_axes; ++i) {
      const auto [stride, count] = axes[i];
      if (stride < period ? stride != 0 : stride % period != 0) span += (count - 1) * stride;
    }
    return span;
  }
};

namespace overlap_detail {

[[nodiscard]] inline bool ranges_meet(const Strided& a, const Strided& b) { return a.low < b.end && b.low < a.end; }

// Return true if the arrays occupy disjoint ranges modulo `period`.
[[nodiscard]] inline bool apart_within(const Strided& a, const Strided& b, int64_t period) {
  const int64_t distance = b.low - a.low;
  const int64_t remainder = -period < distance && distance < period ? distance : distance % period;
  const int64_t offset = remainder < 0 ? remainder + period : remainder;
  return a.span_within(period) <= offset && offset + b.span_within(period) <= period;
}

// Exact search for x with low <= sum(x[k] * stride[k]) <= high, 0 <= x[k] < count[k].
class Search {
 public:
  void add(int64_t stride, int64_t count) {
    if (stride == 0) return;
    for (Strided::Axis& term : terms_) {
      if (term.stride != stride) continue;
      term.count += count - 1;
      return;
    }
    terms_.push_back({stride, count});
  }

  [[nodiscard]] bool reaches(int64_t low, int64_t high) {
    std::sort(terms_.begin(), terms_.end(), [](const auto& a, const auto& b) { return a.stride > b.stride; });
    reach_.assign(terms_.size() + 1, 0);
    divisor_.assign(terms_.size() + 1, 0);
    for (size_t k = terms_.size(); k-- > 0;) {
      reach_[k] = reach_[k + 1] + terms_[k].stride * (terms_[k].count - 1);
      divisor_[k] = std::gcd(divisor_[k + 1], terms_[k].stride);
    }
    steps_ = 0;
    return reaches_from(0, low, high);
  }

 private:
  static constexpr int kMaxSteps = 100'000;

  [[nodiscard]] bool reaches_from(size_t k, int64_t low, int64_t high) {
    low = std::max<int64_t>(low, 0);
    high = std::min(high, reach_[k]);
    if (low > high) return false;
    if (k == terms_.size() || ++steps_ > kMaxSteps) return true;
    if (high / divisor_[k] * divisor_[k] < low) return false;
    const auto [stride, count] = terms_[k];
    const int64_t rest = reach_[k + 1];
    const int64_t first = low > rest ? ceil_div(low - rest, stride) : 0;
    const int64_t last = std::min(count - 1, high / stride);
    for (int64_t x = first; x <= last; ++x) {
      if (reaches_from(k + 1, low - x * stride, high - x * stride)) return true;
    }
    return false;
  }

  std::vector<Strided::Axis> terms_;
  std::vector<int64_t> reach_;    // largest sum of the terms from k on
  std::vector<int64_t> divisor_;  // greatest common divisor of their strides
  int steps_ = 0;
};

// Return true if an item of `a` overlaps an item of `b`. Indices of `b` are counted from its last item, so that all
// terms are positive.
[[nodiscard]] inline bool items_meet(const Strided& a, const Strided& b) {
  Search search;
  int64_t offset = b.low - a.low;
  for (int i = 0; i < a.num_axes; ++i) search.add(a.axes[i].stride, a.axes[i].count);
  for (int i = 0; i < b.num_axes; ++i) {
    search.add(b.axes[i].stride, b.axes[i].count);
    offset += (b.axes[i].count - 1) * b.axes[i].stride;
  }
  return search.reaches(offset - (a.item - 1), offset + b.item - 1);
}

// Return true if an item overlaps another with a larger index on axis `first` and equal indices on the axes before it.
[[nodiscard]] inline bool meets_itself_along(const Strided& array, int first) {
  Search search;
  int64_t offset = -array.axes[first].stride;
  search.add(array.axes[first].stride, array.axes[first].count - 1);
  for (int i = first + 1; i < array.num_axes; ++i) {
    const auto [stride, count] = array.axes[i];
    search.add(stride, 2 * count - 1);
    offset += (count - 1) * stride;
  }
  return search.reaches(offset - (array.item - 1), offset + array.item - 1);
}

}  // namespace overlap_detail

// Return true if a byte belongs to both arrays.
[[nodiscard]] inline bool overlap(const Strided& a, const Strided& b) {
  using namespace overlap_detail;
  if (!ranges_meet(a, b)) return false;
  for (const Strided* each : {&a, &b}) {
    for (int i = 0; i < each->num_axes; ++i) {
      if (each->axes[i].stride > 0 && apart_within(a, b, each->axes[i].stride)) return false;
    }
  }
  return a.is_beyond_memory() || b.is_beyond_memory() || items_meet(a, b);
}

// Return true if two elements of an array share bytes.
[[nodiscard]] inline bool overlaps_itself(Strided array) {
  if (array.end == array.low) return false;
  std::sort(array.axes, array.axes + array.num_axes, [](const auto& a, const auto& b) { return a.stride < b.stride; });
  int64_t span = array.item;
  bool is_nested = true;
  for (int i = 0; i < array.num_axes; ++i) {
    is_nested = is_nested && array.axes[i].stride >= span;
    span += (array.axes[i].count - 1) * array.axes[i].stride;
  }
  if (is_nested) return false;
  if (array.is_beyond_memory()) return true;
  for (int i = 0; i < array.num_axes; ++i) {
    if (array.axes[i].stride == 0 || overlap_detail::meets_itself_along(array, i)) return true;
  }
  return false;
}

[[nodiscard]] inline bool overlap(const Layout& a, const Layout& b) { return overlap(Strided(a), Strided(b)); }
[[nodiscard]] inline bool overlaps_itself(const Layout& layout) { return overlaps_itself(Strided(layout)); }

// Indices of two arrays in a list that share bytes; first is -1 if there are none.
struct SharedPair {
  int64_t first = -1;
  int64_t second = -1;
};

namespace overlap_detail {

class SharedPairs {
 public:
  SharedPairs(const std::vector<Layout>& layouts, size_t num_written)
      : arrays_(layouts.begin(), layouts.end()), num_written_(num_written) {}

  [[nodiscard]] SharedPair find() {
    for (size_t i = 0; i < arrays_.size(); ++i) order_.push_back(i);
    std::sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return arrays_[a].low < arrays_[b].low; });
    for (size_t begin = 0, end; begin < order_.size(); begin = end) {
      int64_t high = arrays_[order_[begin]].end;
      for (end = begin + 1; end < order_.size() && arrays_[order_[end]].low < high; ++end) {
        high = std::max(high, arrays_[order_[end]].end);
      }
      const SharedPair found = find_among(begin, end);
      if (found.first >= 0) return found;
    }
    return {};
  }

 private:
  // Search order_[begin .. end), a chain of arrays whose byte ranges overlap.
  [[nodiscard]] SharedPair find_among(size_t begin, size_t end) {
    if (end - begin < 2) return {};
    const Strided& first = arrays_[order_[begin]];
    for (int i = 0; end - begin > 2 && i < first.num_axes; ++i) {
      if (first.axes[i].stride > 0 && all_apart_within(begin, end, first.axes[i].stride)) return {};
    }
    for (size_t i = begin; i < end; ++i) {
      for (size_t j = i + 1; j < end; ++j) {
        const size_t a = std::min(order_[i], order_[j]), b = std::max(order_[i], order_[j]);
        if (a < num_written_ && overlap(arrays_[a], arrays_[b])) {
          return {static_cast<int64_t>(a), static_cast<int64_t>(b)};
        }
      }
    }
    return {};
  }

  [[nodiscard]] bool all_apart_within(size_t begin, size_t end, int64_t period) {
    ranges_.clear();
    const int64_t origin = arrays_[order_[begin]].low;
    for (size_t i = begin; i < end; ++i) {
      const Strided& array = arrays_[order_[i]];
      const int64_t offset = (array.low - origin) % period;
      ranges_.emplace_back(offset, offset + array.span_within(period));
    }
    std::sort(ranges_.begin(), ranges_.end());
    for (size_t i = 1; i < ranges_.size(); ++i) {
      if (ranges_[i - 1].second > ranges_[i].first) return false;
    }
    return ranges_.back().second <= period + ranges_.front().first;
  }

  std::vector<Strided> arrays_;
  size_t num_written_;
  std::vector<size_t> order_;
  std::vector<std::pair<int64_t, int64_t>> ranges_;
};

}  // namespace overlap_detail

// Find two arrays that share bytes, at least one of them among the first `num_written`. Takes O(n log n) for n slices
// of one array, such as the planes of a pool.
[[nodiscard]] inline SharedPair find_shared(const std::vector<Layout>& layouts, size_t num_written) {
  return overlap_detail::SharedPairs(layouts, num_written).find();
}

}  // namespace pagecore
