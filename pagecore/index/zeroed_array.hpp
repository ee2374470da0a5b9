// A fixed array of zeros that costs address space, not memory, until it is written.
//
// calloc takes large arrays straight from the kernel, whose pages appear, zeroed, at their first touch: a pool or a
// table with room for millions is made in microseconds and grows with what is used.
#pragma once

#include <cstdlib>
#include <memory>

#include "pagecore/native/checks.hpp"

namespace pagecore {

template <typename T>
class ZeroedArray {
 public:
  explicit ZeroedArray(size_t size) : data_(static_cast<T*>(std::calloc(size > 0 ? size : 1, sizeof(T)))), size_(size) {
    PC_EXPECTS(data_ != nullptr, NotEnoughMemory, "an index array of ", size, " x ", sizeof(T),
               " bytes cannot be had; make the pool or the tables smaller");
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
