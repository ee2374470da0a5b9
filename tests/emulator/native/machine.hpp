// The emulated machine: it runs one block at a time. The threads of a block are fibers, which switch at collectives.
//
// Threads run in the order of warps and lanes, or in an order that a seed selects, each until it waits for others. The
// last thread to reach a collective does the work of all of them. Nothing is thread-safe: one launch runs at a time.
//
// Every function takes the place in the kernel's source from which it was called. Errors name the place and end the
// launch.
#pragma once

#include <cstdint>
#include <source_location>

namespace emulator {

using Site = std::source_location;

inline constexpr int kLanes = 32;
inline constexpr int kMaxThreads = 1024;

// Indices of the running thread.
struct Place {
  int thread;
  int lane;
  int warp;
  int num_threads;
  int block[3];
  int num_blocks[3];
};
extern Place place;

// Ends the launch with a message, which follows the names of kernel, block, thread and place.
[[noreturn]] void fail(const Site& site, const char* format, ...) __attribute__((format(printf, 2, 3)));
[[noreturn]] void fail_at(const char* file, unsigned line, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

// Work of a launch so far, in the order of COUNTED of runtime.py.
struct Counts {
  uint64_t read_bytes;    // of device memory, without asynchronous copies
  uint64_t copied_bytes;  // by asynchronous copies, without zeros
  uint64_t written_bytes;
  uint64_t matrix_loads;      // 8 x 8 matrices, four for each pc_load_matrices
  uint64_t matrix_conflicts;  // extra passes over the banks of shared memory for them
  uint64_t most_accesses;     // largest number of accesses to device memory of a thread between two collectives
};
extern Counts counts;

// ---- collectives

void sync_block(const Site& site);
void sync_warp(const Site& site);

enum class Shuffle { exclusive_or, from_lane, up };
uint32_t shuffle(Shuffle kind, uint32_t value, int operand, const Site& site);
uint32_t ballot(bool condition, const Site& site);

void load_matrices(uint32_t (&r)[4], uint32_t row, bool transposed, const Site& site);

enum class MatrixType { bfloat16, half };
void multiply(MatrixType type, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Site& site);

// ---- device memory

// A range of memory that kernels may access.
struct Allocation {
  uint64_t begin;
  uint64_t size;
  // For each byte, the numbers of the last write and of the last read in this launch (order.hpp); null before the
  // first.
  uint32_t* writes = nullptr;
  uint32_t* reads = nullptr;
  bool is_written = false;  // by this launch or an earlier one; reads are recorded from then on

  bool holds(uint64_t address, uint64_t num_bytes) const {
    return num_bytes <= size && address - begin <= size - num_bytes;
  }
};

// Returns the allocation that contains an address, or null.
const Allocation* find_allocation(uint64_t address);

// Reports an access outside the allocation of its pointer, or outside all allocations if `allocation` is null.
[[noreturn]] void fail_access(const char* what, uint64_t address, uint64_t num_bytes, const Allocation* allocation,
                              const Site& site);
[[noreturn]] void fail_alignment(const char* what, uint64_t address, uint64_t alignment, const Site& site);

// Accesses of the running thread since it last waited. A thread that exceeds the maximum spins on another block.
extern uint32_t num_accesses;
inline constexpr uint32_t kMaxAccesses = 1 << 26;
[[noreturn]] void fail_endless(const Site& site);

// Records accesses and fences, to check their order among threads and blocks. A write is recorded before it is done.
// `once`: by load_vector_once, of bytes that no thread writes during the launch.
void note_device_read(const Allocation& allocation, uint64_t address, uint32_t num_bytes, bool once, const Site& site);
void note_device_write(const Allocation& allocation, uint64_t address, const void* value, uint32_t num_bytes,
                       const Site& site);
void note_device_atomic(const Allocation& allocation, uint64_t address, uint32_t num_bytes);
void fence_device();

// ---- shared memory

// Address of the first byte: a multiple of 128 and of no larger power of two, because kernels may not rely on more.
inline constexpr uint32_t kSharedBase = 1152;

uint32_t shared_size();
// Access by the offset in the buffer; sizes are 1, 2, 4, 8 or 16 bytes, or a multiple of 4.
void read_shared(void* result, int64_t offset, uint32_t num_bytes, uint32_t alignment, const Site& site);
void write_shared(const void* value, int64_t offset, uint32_t num_bytes, uint32_t alignment, const Site& site);
// Adds to an int, and returns its previous value. Additions by different threads need no barrier between them.
int add_shared(int value, int64_t offset, const Site& site);

// `source`: 0 to write zeros. `num_bytes`: 4 or 16.
void copy_async(uint32_t target, uint64_t source, uint32_t num_bytes, const Site& site);
void commit_copies();
void wait_copies(int max_groups);

}  // namespace emulator
