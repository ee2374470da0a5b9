// Preloaded: the allocations of one thread fail from the `first` to the `last` after failing_malloc_arm.
//
// Built and loaded by tests/faults.py. The functions of glibc that are called here are its own allocator under the
// names that a preloaded malloc does not hide.
#include <cerrno>
#include <cstddef>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace {

struct Plan {
  bool armed;
  long count, first, last;  // last 0: all that follow
};

// Of the initial executable's kind, so that the first use in a thread allocates nothing.
thread_local Plan plan __attribute__((tls_model("initial-exec")));

bool fails() {
  if (!plan.armed) return false;
  ++plan.count;
  return plan.count >= plan.first && (plan.last == 0 || plan.count <= plan.last);
}

void* no_memory() {
  errno = ENOMEM;
  return nullptr;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void failing_malloc_arm(long first, long last) { plan = {true, 0, first, last}; }

// Returns how many allocations there were since the call of arm.
__attribute__((visibility("default"))) long failing_malloc_disarm() {
  plan.armed = false;
  return plan.count;
}

__attribute__((visibility("default"))) void* malloc(size_t size) { return fails() ? no_memory() : __libc_malloc(size); }

__attribute__((visibility("default"))) void* calloc(size_t count, size_t size) {
  return fails() ? no_memory() : __libc_calloc(count, size);
}

__attribute__((visibility("default"))) void* realloc(void* old, size_t size) {
  return fails() ? no_memory() : __libc_realloc(old, size);
}

__attribute__((visibility("default"))) void* memalign(size_t alignment, size_t size) {
  return fails() ? no_memory() : __libc_memalign(alignment, size);
}

__attribute__((visibility("default"))) void* aligned_alloc(size_t alignment, size_t size) {
  return fails() ? no_memory() : __libc_memalign(alignment, size);
}

__attribute__((visibility("default"))) int posix_memalign(void** out, size_t alignment, size_t size) {
  if (fails()) return ENOMEM;
  *out = __libc_memalign(alignment, size);
  return *out == nullptr ? ENOMEM : 0;
}
}
