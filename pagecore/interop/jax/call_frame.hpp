// Arguments, results and errors of a handler, through the C interface of XLA's foreign function interface.
//
// The interface is binary and backward compatible: XLA accepts handlers that were compiled for an older version. So the
// header in third_party comes from the oldest supported JAX, and the build needs neither JAX nor its headers.
#pragma once

#include <cfenv>
#include <cstdint>
#include <cstdio>
#include <string_view>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/host_calls.hpp"
#include "third_party/xla_ffi_c_api.h"

namespace pagecore::xla {

// The call of a handler. XLA keeps the buffers and attributes alive and in place until the handler returns.
class CallFrame {
 public:
  explicit CallFrame(const XLA_FFI_CallFrame& frame) : frame_(frame) {}

  // Arguments and results are read one by one, in the order of the call.
  [[nodiscard]] const XLA_FFI_Buffer& next_argument() {
    PC_ASSERT(num_arguments_ < frame_.args.size && frame_.args.types[num_arguments_] == XLA_FFI_ArgType_BUFFER);
    return *static_cast<const XLA_FFI_Buffer*>(frame_.args.args[num_arguments_++]);
  }
  [[nodiscard]] const XLA_FFI_Buffer& next_result() {
    PC_ASSERT(num_results_ < frame_.rets.size && frame_.rets.types[num_results_] == XLA_FFI_RetType_BUFFER);
    return *static_cast<const XLA_FFI_Buffer*>(frame_.rets.rets[num_results_++]);
  }
  [[nodiscard]] bool has_more_results() const { return num_results_ < frame_.rets.size; }
  [[nodiscard]] bool is_done() const { return num_arguments_ == frame_.args.size && !has_more_results(); }

  [[nodiscard]] int64_t integer(std::string_view name) const {
    return *static_cast<const int64_t*>(scalar(name, XLA_FFI_DataType_S64));
  }
  [[nodiscard]] double number(std::string_view name) const {
    return *static_cast<const double*>(scalar(name, XLA_FFI_DataType_F64));
  }

 private:
  [[nodiscard]] const void* scalar(std::string_view name, XLA_FFI_DataType type) const {
    const XLA_FFI_Attrs& attributes = frame_.attrs;
    for (int64_t i = 0; i < attributes.size; ++i) {
      const XLA_FFI_ByteSpan& given = *attributes.names[i];
      if (std::string_view(given.ptr, given.len) != name) continue;
      PC_ASSERT(attributes.types[i] == XLA_FFI_AttrType_SCALAR);
      const auto& found = *static_cast<const XLA_FFI_Scalar*>(attributes.attrs[i]);
      PC_ASSERT(found.dtype == type);
      return found.value;
    }
    fail(ErrorKind::Internal, "pagecore is inconsistent: the call has no attribute ", name);
  }

  const XLA_FFI_CallFrame& frame_;
  int64_t num_arguments_ = 0;
  int64_t num_results_ = 0;
};

// XLA asks a handler for its version when the handler is registered. Returns true if this call was such a query.
[[nodiscard]] inline bool answered_version(const XLA_FFI_CallFrame& frame) {
  if (frame.extension_start == nullptr || frame.extension_start->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata& answer = *reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame.extension_start)->metadata;
  answer.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  answer.traits = 0;
  answer.state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
  return true;
}

[[nodiscard]] inline XLA_FFI_Error_Code status_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::InvalidBlock:
    case ErrorKind::InvalidSequence: return XLA_FFI_Error_Code_OUT_OF_RANGE;
    case ErrorKind::UnsupportedDtype:
    case ErrorKind::UnsupportedOption: return XLA_FFI_Error_Code_UNIMPLEMENTED;
    case ErrorKind::NotEnoughMemory: return XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    case ErrorKind::Internal: return XLA_FFI_Error_Code_INTERNAL;
    default: return XLA_FFI_Error_Code_INVALID_ARGUMENT;
  }
}

[[nodiscard]] inline const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::InvalidBlock: return "InvalidBlock";
    case ErrorKind::InvalidSequence: return "InvalidSequence";
    case ErrorKind::NotEnoughMemory: return "NotEnoughMemory";
    case ErrorKind::ShapeError: return "ShapeError";
    case ErrorKind::UnsupportedDtype: return "UnsupportedDtype";
    case ErrorKind::UnsupportedOption: return "UnsupportedOption";
    default: return "PagecoreError";
  }
}

// Text of the Python exception: begins with the name of the exception that pagecore itself would raise.
[[nodiscard]] inline XLA_FFI_Error* make_error(const XLA_FFI_CallFrame& frame, const cpu::Failure& failure) {
  char text[sizeof failure.message + 64];  // room for the name; no allocation, which could fail
  std::snprintf(text, sizeof text, "%s: %s", name_of(failure.kind), failure.message);
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text, status_of(failure.kind)};
  return frame.api->XLA_FFI_Error_Create(&args);
}

// Default floating-point environment for the time of a call. XLA's threads flush denormal numbers to 0, pagecore does
// not; with the default environment a call is bit-identical to a call outside of JAX.
class PlainArithmetic {
 public:
  PlainArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  PlainArithmetic(const PlainArithmetic&) = delete;
  PlainArithmetic& operator=(const PlainArithmetic&) = delete;
  ~PlainArithmetic() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

}  // namespace pagecore::xla
