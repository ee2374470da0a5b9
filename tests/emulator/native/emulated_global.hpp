// Global<T> of the emulator: every access must lie in the allocation that the pointer was made from.
#pragma once

#include <cstring>

#include "machine.hpp"

template <typename T>
class Global {
 public:
  PC_MEMBER Global() = default;
  PC_MEMBER explicit Global(pc_address address) : address_(address), region_(emulator::find_region(address)) {}

  PC_MEMBER explicit operator bool() const { return address_ != 0; }
  PC_MEMBER Global operator+(pc_int64 count) const { return Global(at(count), region_); }
  PC_MEMBER pc_address address() const { return address_; }
  template <typename U>
  PC_MEMBER Global<U> as() const {
    return Global<U>(address_, region_);
  }

  PC_MEMBER T load(pc_int64 i, PC_SITE) const { return read<T>(i, site); }
  PC_MEMBER void store(pc_int64 i, T value, PC_SITE) const { write(i, value, site); }
  PC_MEMBER pc_vector load_vector(pc_int64 i, PC_SITE) const { return read<pc_vector>(i, site); }
  PC_MEMBER void store_vector(pc_int64 i, pc_vector value, PC_SITE) const { write(i, value, site); }
  PC_MEMBER pc_vector load_vector_once(pc_int64 i, PC_SITE) const { return read<pc_vector>(i, site); }

  PC_MEMBER T atomic_add(pc_int64 i, T value, PC_SITE) const {
    static_assert(std::is_same_v<T, int>);
    const T before = read<T>(i, site);
    write(i, static_cast<T>(static_cast<pc_uint32>(before) + static_cast<pc_uint32>(value)), site);
    return before;
  }
  PC_MEMBER void atomic_min(pc_int64 i, T value, PC_SITE) const {
    static_assert(std::is_same_v<T, unsigned long long>);
    if (value < read<T>(i, site)) write(i, value, site);
  }

 private:
  PC_MEMBER Global(pc_address address, emulator::Region region) : address_(address), region_(region) {}

  PC_MEMBER pc_address at(pc_int64 i) const { return address_ + static_cast<pc_address>(i) * sizeof(T); }

  template <typename V>
  PC_MEMBER pc_address checked(const char* what, pc_int64 i, const emulator::Site& site) const {
    const pc_address address = at(i);
    const emulator::Region region = region_.size != 0 ? region_ : emulator::find_region(address);
    if (!region.holds(address, sizeof(V))) emulator::fail_access(what, address, sizeof(V), region_, site);
    if (address % alignof(V) != 0) emulator::fail_alignment(what, address, alignof(V), site);
    return address;
  }
  template <typename V>
  PC_MEMBER V read(pc_int64 i, const emulator::Site& site) const {
    V value;
    std::memcpy(&value, reinterpret_cast<const void*>(checked<V>("reads", i, site)), sizeof(V));
    return value;
  }
  template <typename V>
  PC_MEMBER void write(pc_int64 i, V value, const emulator::Site& site) const {
    std::memcpy(reinterpret_cast<void*>(checked<V>("writes", i, site)), &value, sizeof(V));
  }

  template <typename U>
  friend class Global;
  template <typename U>
  friend void pc_copy_async(pc_uint32 target, const Global<U>& source, pc_int64 i, bool valid,
                            const emulator::Site& site);

  pc_address address_ = 0;
  emulator::Region region_;  // where it was known when the address was given
};
