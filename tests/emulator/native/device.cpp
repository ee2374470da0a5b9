// Accesses to device memory: each must be inside the allocation from which its pointer was made, and aligned.
#include <cstring>

#include "block.hpp"

namespace emulator {

namespace {

// Returns the allocation of an access; ends the launch if the access is invalid.
const Allocation& checked(const char* what, uint64_t address, Extent extent, const Allocation* made_from, Site site) {
  if (++num_accesses > kMaxAccesses) fail_endless(site);
  if (num_accesses > counts.most_accesses) counts.most_accesses = num_accesses;
  const Allocation* allocation = made_from != nullptr ? made_from : find_allocation(address);
  if (allocation == nullptr || !allocation->holds(address, extent.num_bytes)) {
    fail_access(what, address, extent.num_bytes, made_from, site);
  }
  if (address % extent.alignment != 0) fail_alignment(what, address, extent.alignment, site);
  return *allocation;
}

void expect_readable(const char* what, uint64_t address, Extent extent, const Allocation* made_from, bool once,
                     Site site) {
  const Allocation& allocation = checked(what, address, extent, made_from, site);
  if (allocation.is_written) note_device_read(allocation, address, extent.num_bytes, once, site);
}

}  // namespace

void read_device(void* value, uint64_t address, Extent extent, const Allocation* made_from, bool once, Site site) {
  expect_readable("reads", address, extent, made_from, once, site);
  counts.read_bytes += extent.num_bytes;
  copy_bytes(value, reinterpret_cast<const void*>(address), extent.num_bytes);
}

void write_device(const void* value, uint64_t address, Extent extent, const Allocation* made_from, Site site) {
  const Allocation& allocation = checked("writes", address, extent, made_from, site);
  note_device_write(allocation, address, value, extent.num_bytes, site);
  counts.written_bytes += extent.num_bytes;
  copy_bytes(reinterpret_cast<void*>(address), value, extent.num_bytes);
}

void* change_device(uint64_t address, Extent extent, const Allocation* made_from, Site site) {
  note_device_atomic(checked("changes", address, extent, made_from, site), address, extent.num_bytes);
  return reinterpret_cast<void*>(address);
}

void expect_copyable(uint64_t address, uint32_t num_bytes, const Allocation* made_from, Site site) {
  expect_readable("copies", address, {num_bytes, num_bytes}, made_from, false, site);
}

}  // namespace emulator
