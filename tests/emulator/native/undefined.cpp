// Handlers of undefined behaviour in kernels: an index outside a local array, an overflow of int. They replace those of
// UBSan's runtime, which is not linked. The data that they receive begins with the place in the source.
#include <cstdint>

#include "block.hpp"

namespace {

struct UbsanPlace {
  const char* file;
  uint32_t line;
  uint32_t column;
};

[[noreturn]] void refuse(const void* data, const char* what) {
  const UbsanPlace& at = *static_cast<const UbsanPlace*>(data);
  emulator::fail_at(at.file, at.line, "%s", what);
}

}  // namespace

extern "C" {

#define PC_HANDLER(name, what) \
  [[noreturn]] void __ubsan_handle_##name(const void* data) { refuse(data, what); }

PC_HANDLER(add_overflow_abort, "a sum overflows its type")
PC_HANDLER(sub_overflow_abort, "a difference overflows its type")
PC_HANDLER(mul_overflow_abort, "a product overflows its type")
PC_HANDLER(negate_overflow_abort, "a negation overflows its type")
PC_HANDLER(divrem_overflow_abort, "a division by zero, or of the least number by -1")
PC_HANDLER(shift_out_of_bounds_abort, "a shift by more bits than the type has, or by a negative number")
PC_HANDLER(out_of_bounds_abort, "an index lies outside a local array")
PC_HANDLER(builtin_unreachable, "unreachable code is reached")
PC_HANDLER(missing_return, "a function ends without returning its value")

#undef PC_HANDLER
}
