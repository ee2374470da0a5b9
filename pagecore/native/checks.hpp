// Errors and checks of the native code.
//
// PC_EXPECTS checks arguments at a boundary. It throws a typed Error whose message names the value, the limit and the
// remedy. PC_ASSERT checks invariants that only a defect of pagecore can break, and throws Internal. Both are compiled
// into every build, because a broken index corrupts caches silently; keep them out of inner loops.
#pragma once

#include <cstdint>
#include <exception>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace pagecore {

// The exceptions of pagecore/errors.py that native code raises; translate.hpp maps them.
enum class ErrorKind {
  OutOfBlocks,
  OutOfRows,
  NotEnoughMemory,
  InvalidBlock,
  DoubleFree,
  InvalidSequence,
  ShapeError,
  UnsupportedDtype,
  UnsupportedOption,
  DeviceError,
  Internal,
};

class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string message) : kind_(kind), message_(std::move(message)) {}

  // OutOfBlocks, with one entry for each group.
  Error(std::string message, std::vector<int64_t> requested, std::vector<int64_t> available)
      : kind_(ErrorKind::OutOfBlocks),
        message_(std::move(message)),
        requested_(std::move(requested)),
        available_(std::move(available)) {}

  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }
  [[nodiscard]] const char* what() const noexcept override { return message_.c_str(); }
  [[nodiscard]] const std::vector<int64_t>& requested() const noexcept { return requested_; }
  [[nodiscard]] const std::vector<int64_t>& available() const noexcept { return available_; }

 private:
  ErrorKind kind_;
  std::string message_;
  std::vector<int64_t> requested_;
  std::vector<int64_t> available_;
};

template <typename... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(ErrorKind kind, const Parts&... parts) {
  throw Error(kind, concat(parts...));
}

}  // namespace pagecore

// PC_EXPECTS(count >= 0, ShapeError, "count is ", count, "; counts start at 0")
#define PC_EXPECTS(condition, kind, ...)                          \
  do {                                                            \
    if (!(condition)) [[unlikely]] {                              \
      ::pagecore::fail(::pagecore::ErrorKind::kind, __VA_ARGS__); \
    }                                                             \
  } while (false)

#define PC_ASSERT(condition)                                                                                        \
  do {                                                                                                              \
    if (!(condition)) [[unlikely]] {                                                                                \
      ::pagecore::fail(::pagecore::ErrorKind::Internal, "pagecore is inconsistent: ", #condition, " at ", __FILE__, \
                       ":", __LINE__);                                                                              \
    }                                                                                                               \
  } while (false)
