// Scratch memory that a thread keeps between calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace pagecore::cpu {

// Aligned scratch memory that grows and never shrinks.
class ScratchBuffer {
 public:
  ScratchBuffer() = default;
  ScratchBuffer(const ScratchBuffer&) = delete;
  ScratchBuffer& operator=(const ScratchBuffer&) = delete;
  ~ScratchBuffer() { release(); }

  [[nodiscard]] float* reserve(int64_t floats) {
    if (floats > capacity_) {
      release();
      data_ = static_cast<float*>(::operator new(static_cast<size_t>(floats) * sizeof(float), kAlignment));
      capacity_ = floats;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlignment{4096};

  void release() noexcept {
    if (data_ != nullptr) ::operator delete(data_, kAlignment);
    data_ = nullptr;
    capacity_ = 0;
  }

  float* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace pagecore::cpu
