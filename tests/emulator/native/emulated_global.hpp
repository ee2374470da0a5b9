// Global<T> of the emulator: every access must be inside the allocation from which the pointer was made.
#pragma once

#include <cstring>

#include "machine.hpp"

template <typename T>
class Global {
 public:
  PC_MEMBER Global() = default;
  PC_MEMBER explicit Global(pc_address address) : address_(address), allocation_(emulator::find_allocation(address)) {}

  PC_MEMBER explicit operator bool() const { return address_ != 0; }
  PC_MEMBER Global operator+(pc_int64 count) const { return Global(at(count), allocation_); }
  PC_MEMBER pc_address address() const { return address_; }
  template <typename U>
  PC_MEMBER Global<U> as() const {
    return Global<U>(address_, allocation_);
  }

  PC_MEMBER T load(pc_int64 i, PC_SITE) const { return read<T>(i, site); }
  PC_MEMBER void store(pc_int64 i, T value, PC_SITE) const { write(i, value, site); }
  PC_MEMBER T load_if(bool condition, pc_int64 i, PC_SITE) const { return condition ? read<T>(i, site) : T{}; }
  PC_MEMBER void store_if(bool condition, pc_int64 i, T value, PC_SITE) const {
    if (condition) write(i, value, site);
  }
  PC_MEMBER pc_vector load_vector(pc_int64 i, PC_SITE) const { return read<pc_vector>(i, site); }
  PC_MEMBER void store_vector(pc_int64 i, pc_vector value, PC_SITE) const { write(i, value, site); }
  PC_MEMBER pc_vector load_vector_once(pc_int64 i, PC_SITE) const { return read<pc_vector>(i, site, true); }

  PC_MEMBER T atomic_add(pc_int64 i, T value, PC_SITE) const {
    static_assert(std::is_same_v<T, int>);
    return change(i, site, [&](T before) {
      return static_cast<T>(static_cast<pc_uint32>(before) + static_cast<pc_uint32>(value));
    });
  }
  PC_MEMBER void atomic_min(pc_int64 i, T value, PC_SITE) const {
    static_assert(std::is_same_v<T, unsigned long long>);
    change(i, site, [&](T before) { return value < before ? value : before; });
  }

 private:
  PC_MEMBER Global(pc_address address, const emulator::Allocation* allocation)
      : address_(address), allocation_(allocation) {}

  PC_MEMBER pc_address at(pc_int64 i) const { return address_ + static_cast<pc_address>(i) * sizeof(T); }

  template <typename V>
  PC_MEMBER V read(pc_int64 i, emulator::Site site, bool once = false) const {
    V value;
    emulator::read_device(&value, at(i), emulator::extent_of<V>, allocation_, once, site);
    return value;
  }
  template <typename V>
  PC_MEMBER void write(pc_int64 i, V value, emulator::Site site) const {
    emulator::write_device(&value, at(i), emulator::extent_of<V>, allocation_, site);
  }
  template <typename F>
  PC_MEMBER T change(pc_int64 i, emulator::Site site, F f) const {
    void* const target = emulator::change_device(at(i), emulator::extent_of<T>, allocation_, site);
    T before;
    std::memcpy(&before, target, sizeof(T));
    const T after = f(before);
    std::memcpy(target, &after, sizeof(T));
    return before;
  }

  template <typename U>
  friend class Global;
  template <typename U>
  friend void pc_copy_async(pc_uint32 target, const Global<U>& source, pc_int64 i, bool valid, emulator::Site site);
  friend void pc_copy_word_async(pc_uint32 target, const Global<pc_uint8>& source, pc_int64 i, bool valid,
                                 emulator::Site site);

  pc_address address_ = 0;
  const emulator::Allocation* allocation_ = nullptr;  // that contained the address when the pointer was made
};
