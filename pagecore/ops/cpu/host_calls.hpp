// The host operations as function pointers, for native code of other extensions that does not hold the GIL. The kernels
// are linked into ops/cpu/_cpu alone. Exceptions do not cross to another extension.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string_view>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu {

// The error of a call. The text is stored inline, so that an out-of-memory error can be reported without allocating.
struct Failure {
  ErrorKind kind = ErrorKind::Internal;
  char message[1024] = "";

  // Longer texts are cut, before a character of UTF-8 rather than within one.
  void set(ErrorKind of, std::string_view text) noexcept {
    kind = of;
    size_t size = std::min(text.size(), sizeof message - 1);
    while (size > 0 && size < text.size() && (text[size] & 0xc0) == 0x80) --size;
    text.copy(message, size);
    message[size] = '\0';
  }
};

// Returns true if `call` has returned; otherwise `failure` describes its exception.
template <typename Call>
[[nodiscard]] bool attempt(Call&& call, Failure& failure) noexcept {
  try {
    call();
    return true;
  } catch (const Error& error) {
    failure.set(error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    failure.set(ErrorKind::NotEnoughMemory, "the host cannot allocate the workspace of the call");
  } catch (const std::exception& error) {
    failure.set(ErrorKind::Internal, error.what());
  }
  return false;
}

// The functions of ops.hpp and codecs/seal.hpp, callable from any thread. They return false after an error; `failure`
// then describes it, and nothing was written.
struct HostCalls {
  bool (*attention)(const AttentionArgs& args, int64_t num_threads, Failure& failure) noexcept;
  bool (*write_kv)(const WriteArgs& args, int64_t num_threads, Failure& failure) noexcept;
  bool (*seal_blocks)(const SealArgs& args, int64_t num_threads, Failure& failure) noexcept;
  bool (*unseal_blocks)(const SealArgs& args, int64_t num_threads, Failure& failure) noexcept;
};

[[nodiscard]] const HostCalls& host_calls() noexcept;

}  // namespace pagecore::cpu
