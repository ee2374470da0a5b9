// Buffers of a custom call as arguments of pagecore's operations. They are dense and row-major.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#include "pagecore/interop/jax/call_frame.hpp"
#include "pagecore/ops/cpu/host_calls.hpp"

namespace pagecore::xla {

// Optional arguments, after the required ones. The attribute "given" of a call has a bit for each that is present.
enum Optional : int64_t {
  kLayer,
  kRows,
  kCuQueryLens,
  kSinks,
  kAlibiSlopes,
  kMask,
  kTreeMask,
  kPositions,
  kKeyScale,
  kValueScale,
  kKeyPlane,
  kValuePlane,
  kSealedKey,
  kSealedValue,
  kSealedKeyScale,
  kSealedValueScale,
  kSealedTable,
  kSealedLens,
  kAddresses
};

class Options {
 public:
  explicit Options(CallFrame& frame) : frame_(frame), given_(frame.integer("given")) {}

  // Call in the order of the enumeration.
  [[nodiscard]] const XLA_FFI_Buffer* next(Optional option) {
    return (given_ >> option & 1) != 0 ? &frame_.next_argument() : nullptr;
  }

 private:
  CallFrame& frame_;
  int64_t given_;
};

[[nodiscard]] inline Float float_type(const XLA_FFI_Buffer& buffer) {
  switch (buffer.dtype) {
    case XLA_FFI_DataType_F32: return Float::F32;
    case XLA_FFI_DataType_F16: return Float::F16;
    case XLA_FFI_DataType_BF16: return Float::BF16;
    default: fail(ErrorKind::Internal, "pagecore is inconsistent: XLA dtype ", buffer.dtype, " is not a float");
  }
}

[[nodiscard]] inline Float stored_type(const XLA_FFI_Buffer& buffer) {
  switch (buffer.dtype) {
    case XLA_FFI_DataType_F8E4M3FN: return Float::F8E4M3FN;
    case XLA_FFI_DataType_F8E5M2: return Float::F8E5M2;
    case XLA_FFI_DataType_S8: return Float::I8;
    case XLA_FFI_DataType_U8: return Float::U8;
    default: return float_type(buffer);
  }
}

[[nodiscard]] inline bool is_wide(const XLA_FFI_Buffer& buffer) {
  PC_ASSERT(buffer.dtype == XLA_FFI_DataType_S64 || buffer.dtype == XLA_FFI_DataType_S32);
  return buffer.dtype == XLA_FFI_DataType_S64;
}

[[nodiscard]] inline TokenArray rows_of(const XLA_FFI_Buffer& buffer) {
  PC_ASSERT(buffer.rank == 3);
  TokenArray rows{static_cast<char*>(buffer.data), float_type(buffer), buffer.dims[0], buffer.dims[1], buffer.dims[2]};
  rows.head_stride = rows.dim * size_of(rows.type);
  rows.token_stride = rows.num_heads * rows.head_stride;
  return rows;
}

[[nodiscard]] inline Indices indices_of(const XLA_FFI_Buffer* buffer) {
  if (buffer == nullptr) return {};
  PC_ASSERT(buffer->rank <= 1);
  const bool wide = is_wide(*buffer);
  return {static_cast<const char*>(buffer->data), buffer->rank == 0 ? 1 : buffer->dims[0], wide ? 8 : 4, wide};
}

// The layer of stacked arrays.
[[nodiscard]] inline int64_t layer_number(const XLA_FFI_Buffer& given, int64_t num_layers) {
  const int64_t layer = indices_of(&given).at(0);
  PC_EXPECTS(layer >= 0 && layer < num_layers, ShapeError, "layer is ", layer, " and the caches hold ", num_layers,
             " layers; layers start at 0");
  return layer;
}

// Bits of a tree: int32 [num_tokens, 2 * words], low halves first.
[[nodiscard]] inline cpu::Tree tree_of(const XLA_FFI_Buffer* buffer) {
  if (buffer == nullptr) return {};
  PC_ASSERT(buffer->rank == 2 && !is_wide(*buffer) && buffer->dims[1] % 2 == 0);
  return {static_cast<const uint64_t*>(buffer->data), buffer->dims[1] / 2, {}};
}

[[nodiscard]] inline Table table_of(const XLA_FFI_Buffer& buffer) {
  PC_ASSERT(buffer.rank == 2);
  const bool wide = is_wide(buffer);
  return {static_cast<const char*>(buffer.data), buffer.dims[0], buffer.dims[1], buffer.dims[1] * (wide ? 8 : 4), wide};
}

[[nodiscard]] inline PerHead per_head(const XLA_FFI_Buffer* buffer) {
  if (buffer == nullptr) return {};
  PC_ASSERT(buffer->rank == 1);
  const Float type = float_type(*buffer);
  return {static_cast<const char*>(buffer->data), type, size_of(type)};
}

// Checked float32 scales, and their products with `factor`; an eager call makes the same checks when it reads its
// arguments.
[[nodiscard]] inline PerHead scales_of(const XLA_FFI_Buffer* buffer, const char* name, bool divides,
                                       double factor = 1.0) {
  const PerHead scales = per_head(buffer);
  for (int64_t i = 0; buffer != nullptr && i < buffer->dims[0]; ++i) {
    PC_ASSERT(scales.type == Float::F32);
    const float scale = static_cast<const float*>(buffer->data)[i];
    PC_EXPECTS(std::isfinite(scale) && !(divides && scale == 0.0f), UnsupportedOption, name, " holds ", scale,
               "; as a float32 it must be finite", divides ? ", and not 0 to be divided by" : "");
    PC_EXPECTS(std::isfinite(static_cast<float>(factor * scale)), UnsupportedOption, "the product of scale and ", name,
               " is ", factor * scale, " for head ", i, "; it must be finite as a float32");
  }
  return scales;
}

// Axes of cache arrays: [layer,] block, token, head, dim, or with heads before tokens.
class CacheView {
 public:
  CacheView(CallFrame& frame, const XLA_FFI_Buffer* layer)
      : heads_first_(frame.integer("heads_first") != 0), layer_(layer) {}

  // `plane` holds the stored scales of the format; null if it has none.
  [[nodiscard]] Cache of(const XLA_FFI_Buffer& codes, int64_t format, const XLA_FFI_Buffer* plane) const {
    const Strided at = strided(codes);
    Cache cache{at.data, stored_type(codes)};
    cache.format = static_cast<Format>(format);
    cache.num_blocks = at.dims[0];
    cache.block_size = at.dims[heads_first_ ? 2 : 1];
    cache.num_heads = at.dims[heads_first_ ? 1 : 2];
    cache.dim = at.dims[3] * (cache.type == Float::U8 ? 2 : 1);
    cache.block_stride = at.block_stride;
    cache.token_stride = at.token_stride;
    cache.head_stride = at.head_stride;
    if (plane != nullptr) {
      const Strided scales = strided(*plane);
      cache.scales = {scales.data, scales.block_stride, scales.token_stride, scales.head_stride};
    }
    return cache;
  }

 private:
  // One layer of a buffer, with strides in bytes.
  struct Strided {
    char* data;
    const int64_t* dims;
    int64_t block_stride;
    int64_t token_stride;
    int64_t head_stride;
  };

  [[nodiscard]] Strided strided(const XLA_FFI_Buffer& buffer) const {
    PC_ASSERT(buffer.rank == (layer_ == nullptr ? 4 : 5));
    const int64_t* dims = buffer.dims + (layer_ == nullptr ? 0 : 1);
    const int64_t row = dims[3] * size_of(stored_type(buffer)), inner = dims[2] * row;
    Strided at{static_cast<char*>(buffer.data), dims, dims[1] * inner, inner, row};
    if (heads_first_) std::swap(at.token_stride, at.head_stride);
    if (layer_ != nullptr) {
      at.data += layer_number(*layer_, buffer.dims[0]) * dims[0] * at.block_stride;
    }
    return at;
  }

  bool heads_first_;
  const XLA_FFI_Buffer* layer_;  // null: an array holds one layer
};

}  // namespace pagecore::xla
