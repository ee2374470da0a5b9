// Fixed-size array of zeros that reserves address space and commits memory when it is written.
//
// calloc maps large arrays directly from the kernel, which zeroes each page at its first access: a pool or a table for
// millions of entries is constructed in microseconds and uses memory in proportion to what is written.
#pragma once

#include <cstdlib>
#include <memory>

#include "pagecore/native/checks.hpp"

namespace pagecore {

template <typename T>
class ZeroedArray {
 public:
  explicit ZeroedArray(size_t size) : data_(static_cast<T*>(std::calloc(size > 0 ? size : 1, sizeof(T)))), size_(size) {
    PC_EXPECTS(data_ != nullptr, NotEnoughMemory, "cannot allocate an index array of ", size, " x ", sizeof(T),
               " bytes; make the pool or the tables smaller");
  }

  [[nodiscard]] T& operator[](size_t i) noexcept { return data_.get()[i]; }
  [[nodiscard]] const T& operator[](size_t i) const noexcept { return data_.get()[i]; }
  [[nodiscard]] T* data() noexcept { return data_.get(); }
  [[nodiscard]] const T* data() const noexcept { return data_.get(); }
  [[nodiscard]] size_t nbytes() const noexcept { return size_ * sizeof(T); }

 private:
  struct Free {
    void operator()(T* data) const noexcept { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_;
};

}  // namespace pagecore
