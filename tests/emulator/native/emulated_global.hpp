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

  struct Target {
    pc_address address;
    const emulator::Allocation& allocation;
  };

  template <typename V>
  PC_MEMBER Target checked(const char* what, pc_int64 i, const emulator::Site& site) const {
    const pc_address address = at(i);
    if (++emulator::num_accesses > emulator::kMaxAccesses) emulator::fail_endless(site);
    if (emulator::num_accesses > emulator::counts.most_accesses)
      emulator::counts.most_accesses = emulator::num_accesses;
    const emulator::Allocation* allocation = allocation_;
    if (allocation == nullptr) allocation = emulator::find_allocation(address);
    if (allocation == nullptr || !allocation->holds(address, sizeof(V))) {
      emulator::fail_access(what, address, sizeof(V), allocation_, site);
    }
    if (address % alignof(V) != 0) emulator::fail_alignment(what, address, alignof(V), site);
    return {address, *allocation};
  }
  template <typename V>
  PC_MEMBER Target readable(const char* what, pc_int64 i, const emulator::Site& site, bool once = false) const {
    const Target target = checked<V>(what, i, site);
    if (target.allocation.is_written) {
      emulator::note_device_read(target.allocation, target.address, sizeof(V), once, site);
    }
    return target;
  }
  template <typename V>
  PC_MEMBER V read(pc_int64 i, const emulator::Site& site, bool once = false) const {
    V value;
    emulator::counts.read_bytes += sizeof(V);
    std::memcpy(&value, reinterpret_cast<const void*>(readable<V>("reads", i, site, once).address), sizeof(V));
    return value;
  }
  template <typename V>
  PC_MEMBER void write(pc_int64 i, V value, const emulator::Site& site) const {
    const Target target = checked<V>("writes", i, site);
    emulator::note_device_write(target.allocation, target.address, &value, sizeof(V), site);
    std::memcpy(reinterpret_cast<void*>(target.address), &value, sizeof(V));
    emulator::counts.written_bytes += sizeof(V);
  }
  template <typename F>
  PC_MEMBER T change(pc_int64 i, const emulator::Site& site, F f) const {
    const Target target = checked<T>("changes", i, site);
    emulator::note_device_atomic(target.allocation, target.address, sizeof(T));
    T before;
    std::memcpy(&before, reinterpret_cast<const void*>(target.address), sizeof(T));
    const T after = f(before);
    std::memcpy(reinterpret_cast<void*>(target.address), &after, sizeof(T));
    return before;
  }

  template <typename U>
  friend class Global;
  template <typename U>
  friend void pc_copy_async(pc_uint32 target, const Global<U>& source, pc_int64 i, bool valid,
                            const emulator::Site& site);
  friend void pc_copy_word_async(pc_uint32 target, const Global<pc_uint8>& source, pc_int64 i, bool valid,
                                 const emulator::Site& site);

  pc_address address_ = 0;
  const emulator::Allocation* allocation_ = nullptr;  // that contained the address when the pointer was made
};
