// Arrays with any strides for the drivers of the host kernels, with guard bytes on both sides.
//
// The guards are poisoned, so that ASan reports stray accesses as they happen. Stray streaming stores, which ASan does
// not see, show in the bytes of the guards.
#pragma once

#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "pagecore/ops/cpu/args.hpp"
#include "tests/native/harness.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, size) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(start, size) static_cast<void>(0)
#endif

namespace pagecore::test {

class Guarded {
 public:
  // The array starts `shift` bytes after the start of a cache line.
  Guarded(int64_t size, int64_t shift)
      : size_(size), before_(kGuard + shift), memory_(new (std::align_val_t{kGuard}) char[total()]) {
    std::memset(memory_, kMark, total());
    guard();
  }
  Guarded(Guarded&& other) noexcept : size_(other.size_), before_(other.before_), memory_(other.memory_) {
    other.memory_ = nullptr;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() {
    if (memory_ == nullptr) return;
    check();
    ASAN_UNPOISON_MEMORY_REGION(memory_, total());
    ::operator delete[](memory_, std::align_val_t{kGuard});
  }

  [[nodiscard]] char* data() const { return memory_ + before_; }
  [[nodiscard]] int64_t size() const { return size_; }
  [[nodiscard]] std::vector<char> copy() const { return {data(), data() + size_}; }

  void check() const {
    ASAN_UNPOISON_MEMORY_REGION(memory_, total());
    for (int64_t i = 0; i < static_cast<int64_t>(total()); ++i) {
      const bool is_ours = i >= before_ && i < before_ + size_;
      PC_CHECK(is_ours || memory_[i] == kMark, "byte ", i - before_, " of an array of ", size_, " bytes was written");
    }
    guard();
  }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr char kMark = 0x5a;

  [[nodiscard]] size_t total() const { return static_cast<size_t>(before_ + size_ + kGuard); }
  void guard() const {
    ASAN_POISON_MEMORY_REGION(memory_, static_cast<size_t>(before_));
    ASAN_POISON_MEMORY_REGION(data() + size_, static_cast<size_t>(kGuard));
  }

  int64_t size_;
  int64_t before_;
  char* memory_;
};

struct ArrayStyle {
  bool inner_contiguous = true;  // of the last axis
  bool may_gap = true;           // gaps between elements
  bool may_reverse = false;      // negative strides, except on a contiguous last axis
};

// Elements of `itemsize` bytes with the axes in any memory order.
class Array {
 public:
  Array(Random& random, std::vector<int64_t> shape, int64_t itemsize, ArrayStyle style = {})
      : shape_(std::move(shape)), strides_(shape_.size()), itemsize_(itemsize) {
    int64_t extent = itemsize_;
    bool is_empty = false;
    for (const size_t axis : order(random, style)) {
      if (style.may_gap && random.one_in(4) && extent > itemsize_) extent += itemsize_ * random.between(1, 3);
      strides_[axis] = extent;
      extent *= std::max<int64_t>(shape_[axis], 1);
      is_empty = is_empty || shape_[axis] == 0;
    }
    // The array ends at its last element, without the gap.
    extent = is_empty ? 0 : itemsize_;
    for (size_t axis = 0; axis < shape_.size() && !is_empty; ++axis) extent += (shape_[axis] - 1) * strides_[axis];
    for (size_t axis = 0; axis + (style.inner_contiguous ? 1 : 0) < shape_.size() && style.may_reverse; ++axis) {
      if (shape_[axis] == 0 || !random.one_in(5)) continue;
      start_ += (shape_[axis] - 1) * strides_[axis];
      strides_[axis] = -strides_[axis];
    }
    memory_.emplace(extent, itemsize_ * random.below(64 / itemsize_));
    for (int64_t i = 0; i < extent; i += 8) {
      const uint64_t bits = random.bits();
      std::memcpy(memory_->data() + i, &bits, static_cast<size_t>(std::min<int64_t>(extent - i, 8)));
    }
  }

  [[nodiscard]] const std::vector<int64_t>& shape() const { return shape_; }
  [[nodiscard]] int64_t shape(size_t axis) const { return shape_[axis]; }
  [[nodiscard]] int64_t stride(size_t axis) const { return strides_[axis]; }
  [[nodiscard]] int64_t itemsize() const { return itemsize_; }
  [[nodiscard]] char* data() const { return memory_->data() + start_; }
  [[nodiscard]] const Guarded& memory() const { return *memory_; }
  // Offset of an element in the memory.
  [[nodiscard]] int64_t offset(const std::vector<int64_t>& index) const {
    int64_t at = start_;
    for (size_t axis = 0; axis < index.size(); ++axis) at += index[axis] * strides_[axis];
    return at;
  }
  [[nodiscard]] char* at(const std::vector<int64_t>& index) const { return memory_->data() + offset(index); }
  void fill_bytes(char value) { std::memset(memory_->data(), value, static_cast<size_t>(memory_->size())); }

 private:
  // Axes in memory order, innermost first.
  std::vector<size_t> order(Random& random, const ArrayStyle& style) const {
    std::vector<size_t> axes;
    const size_t free = shape_.size() - (style.inner_contiguous && !shape_.empty() ? 1 : 0);
    for (size_t axis = free; axis-- > 0;) axes.push_back(axis);
    if (random.one_in(2)) random.shuffle(axes);
    if (free < shape_.size()) axes.insert(axes.begin(), free);
    return axes;
  }

  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;  // in bytes
  int64_t itemsize_;
  int64_t start_ = 0;
  std::optional<Guarded> memory_;
};

// int32 or int64 with any stride.
class Ids {
 public:
  Ids(Random& random, const std::vector<int64_t>& values)
      : is_wide_(random.one_in(2)),
        size_(std::ssize(values)),
        stride_(itemsize() * (random.one_in(3) ? random.between(2, 3) : 1)),
        memory_(size_ > 0 ? (size_ - 1) * stride_ + itemsize() : 0, itemsize() * random.below(4)) {
    for (int64_t i = 0; i < size_; ++i) store(i, values[static_cast<size_t>(i)]);
  }

  [[nodiscard]] Indices indices() const { return {memory_.data(), size_, stride_, is_wide_}; }

 private:
  [[nodiscard]] int64_t itemsize() const { return is_wide_ ? 8 : 4; }
  void store(int64_t i, int64_t value) {
    const auto narrow = static_cast<int32_t>(value);
    if (is_wide_) std::memcpy(memory_.data() + i * stride_, &value, 8);
    if (!is_wide_) std::memcpy(memory_.data() + i * stride_, &narrow, 4);
  }

  bool is_wide_;
  int64_t size_;
  int64_t stride_;
  Guarded memory_;
};

// A block table: rows of ids.
class IdTable {
 public:
  IdTable(Random& random, const std::vector<std::vector<int64_t>>& rows, int64_t width)
      : is_wide_(random.one_in(2)),
        num_rows_(std::ssize(rows)),
        width_(width),
        row_stride_(itemsize() * (width + random.between(0, 2))),
        memory_(num_rows_ > 0 ? (num_rows_ - 1) * row_stride_ + width * itemsize() : 0, itemsize()) {
    for (int64_t row = 0; row < num_rows_; ++row) {
      for (int64_t i = 0; i < width; ++i) {
        const int64_t id = rows[static_cast<size_t>(row)][static_cast<size_t>(i)];
        std::memcpy(memory_.data() + row * row_stride_ + i * itemsize(), &id, static_cast<size_t>(itemsize()));
      }
    }
  }

  [[nodiscard]] Table table() const { return {memory_.data(), num_rows_, width_, row_stride_, is_wide_}; }

 private:
  [[nodiscard]] int64_t itemsize() const { return is_wide_ ? 8 : 4; }

  bool is_wide_;
  int64_t num_rows_;
  int64_t width_;
  int64_t row_stride_;
  Guarded memory_;
};

}  // namespace pagecore::test
