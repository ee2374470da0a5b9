// Shared<T> and the asynchronous copies of the emulator.
#pragma once

#include <type_traits>

#include "emulated_global.hpp"
#include "machine.hpp"

typedef pc_uint32 SharedAddress;

template <typename T>
class Shared {
 public:
  // `offset`: of the first byte in the shared buffer.
  PC_MEMBER explicit Shared(pc_int64 offset) : offset_(offset) {}

  PC_MEMBER Shared operator+(int count) const { return Shared(at(count)); }
  template <typename U>
  PC_MEMBER Shared<U> as() const {
    return Shared<U>(offset_);
  }
  PC_MEMBER T load(int i, PC_SITE) const { return read<T>(i, site); }
  PC_MEMBER void store(int i, T value, PC_SITE) const { write(i, value, site); }
  PC_MEMBER pc_vector load_vector(int i, PC_SITE) const { return read<pc_vector>(i, site); }
  PC_MEMBER void store_vector(int i, pc_vector value, PC_SITE) const { write(i, value, site); }
  PC_MEMBER T atomic_add(int i, T value, PC_SITE) const {
    static_assert(std::is_same_v<T, int>);
    return emulator::add_shared(value, at(i), site);
  }
  PC_MEMBER SharedAddress address(int i) const { return static_cast<SharedAddress>(emulator::kSharedBase + at(i)); }

 private:
  PC_MEMBER pc_int64 at(int i) const { return offset_ + i * static_cast<pc_int64>(sizeof(T)); }

  template <typename V>
  PC_MEMBER V read(int i, emulator::Site site) const {
    V value;
    emulator::read_shared(&value, at(i), emulator::extent_of<V>, site);
    return value;
  }
  template <typename V>
  PC_MEMBER void write(int i, V value, emulator::Site site) const {
    emulator::write_shared(&value, at(i), emulator::extent_of<V>, site);
  }

  pc_int64 offset_;
};

PC_DEVICE Shared<pc_uint8> pc_shared_buffer() { return Shared<pc_uint8>(0); }

template <typename T>
inline void pc_copy_async(SharedAddress target, const Global<T>& source, pc_int64 i, bool valid, PC_SITE) {
  emulator::copy_async(target, source.at(i), sizeof(pc_vector), source.allocation_, valid, site);
}
inline void pc_copy_word_async(SharedAddress target, const Global<pc_uint8>& source, pc_int64 i, bool valid, PC_SITE) {
  emulator::copy_async(target, source.at(i), sizeof(pc_uint32), source.allocation_, valid, site);
}
PC_DEVICE void pc_commit_copies() { emulator::commit_copies(); }
template <int N>
PC_DEVICE void pc_wait_copies() {
  static_assert(N >= 0);
  emulator::wait_copies(N);
}
