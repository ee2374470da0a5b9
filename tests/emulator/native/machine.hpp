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
[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));
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
[[gnu::visibility("hidden")]] extern Counts counts;

// The fault that is planted for this launch, by its number in faults.py; 0 for none.
extern int planted_fault;
inline bool is_planted(int fault) { return planted_fault == fault; }

// ---- collectives

void sync_block(Site site);
void sync_warp(Site site);

enum class Shuffle { exclusive_or, from_lane, up };
uint32_t shuffle(Shuffle kind, uint32_t value, int operand, Site site);
uint32_t ballot(bool condition, Site site);

void load_matrices(uint32_t (&r)[4], uint32_t row, bool transposed, Site site);

enum class MatrixType { bfloat16, half };
void multiply(MatrixType type, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site site);

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

// The size of an access, and the alignment that it needs.
struct Extent {
  uint32_t num_bytes;
  uint32_t alignment;
};
template <typename T>
inline constexpr Extent extent_of{sizeof(T), alignof(T)};

// Accesses through a pointer that was made from an address in an allocation; `made_from` is null if no allocation
// contained the address. `once`: the read is load_vector_once. They are functions of the emulator, so that kernels do
// not compile them for each type.
void read_device(void* value, uint64_t address, Extent extent, const Allocation* made_from, bool once, Site site);
void write_device(const void* value, uint64_t address, Extent extent, const Allocation* made_from, Site site);
// Returns the address for an atomic change, which the caller makes before it calls another function.
void* change_device(uint64_t address, Extent extent, const Allocation* made_from, Site site);
void fence_device();

// ---- shared memory

// Address of the first byte: a multiple of 128 and of no larger power of two, because kernels may not rely on more.
inline constexpr uint32_t kSharedBase = 1152;

uint32_t shared_size();
// Access by the offset in the buffer; sizes are 1, 2, 4, 8 or 16 bytes, or a multiple of 4.
void read_shared(void* result, int64_t offset, Extent extent, Site site);
void write_shared(const void* value, int64_t offset, Extent extent, Site site);
// Adds to an int, and returns its previous value. Additions by different threads need no barrier between them.
int add_shared(int value, int64_t offset, Site site);

// `num_bytes`: 4 or 16. A copy that is not `valid` writes zeros.
void copy_async(uint32_t target, uint64_t source, uint32_t num_bytes, const Allocation* made_from, bool valid,
                Site site);
void commit_copies();
void wait_copies(int max_groups);

}  // namespace emulator
