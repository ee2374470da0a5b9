// Default options of the sanitizers, linked into every driver; the environment can override them.
//
// Memory is filled with a pattern when allocated and quarantined when freed, so that uninitialised or freed memory does
// not read as zeros. Allocations that are too large fail as they do without a sanitizer. detect_stack_use_after_return
// is off, because GCC 12 lays out its frames such that its own AVX-512 code is misaligned (PR 110027).

extern "C" {

const char* __asan_default_options();
const char* __tsan_default_options();
const char* __ubsan_default_options();

__attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1:detect_leaks=1:detect_stack_use_after_return=0:max_malloc_fill_size=1073741824:"
         "malloc_fill_byte=203:strict_string_checks=1:check_initialization_order=1:strict_init_order=1";
}

__attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "halt_on_error=1:second_deadlock_stack=1:detect_deadlocks=1:allocator_may_return_null=1";
}

__attribute__((visibility("default"))) const char* __ubsan_default_options() { return "print_stacktrace=1"; }
}
