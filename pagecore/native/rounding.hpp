// Integer division that rounds up.
#pragma once

#include <type_traits>

namespace pagecore {

// ceil(n / by), for n >= 0 and by > 0. The sum n + by is never formed, so no n overflows.
template <typename T>
[[nodiscard, gnu::always_inline]] constexpr T ceil_div(T n, std::type_identity_t<T> by) {
  return n / by + (n % by != 0);
}

// The smallest multiple of `unit` that is at least n.
template <typename T>
[[nodiscard, gnu::always_inline]] constexpr T round_up(T n, std::type_identity_t<T> unit) {
  return ceil_div(n, unit) * unit;
}

}  // namespace pagecore
