// Planes of sealed blocks as arguments of pagecore's operations.
#pragma once

#include <cstdint>

#include "pagecore/interop/jax/buffers.hpp"
#include "pagecore/interop/jax/call_frame.hpp"

namespace pagecore::xla {

// Planes of one layer, or of stacked layers. The Python side has checked their shapes against the plain caches.
struct SealedPlanes {
  const XLA_FFI_Buffer* key = nullptr;  // null: no sealed blocks
  const XLA_FFI_Buffer* value = nullptr;
  const XLA_FFI_Buffer* key_scale = nullptr;
  const XLA_FFI_Buffer* value_scale = nullptr;

  [[nodiscard]] static SealedPlanes next(Options& options) {
    return {options.next(kSealedKey), options.next(kSealedValue), options.next(kSealedKeyScale),
            options.next(kSealedValueScale)};
  }
};

namespace internal {

// One layer of a buffer without its layer axis, with the bytes between elements of each other axis.
struct DenseArray {
  char* data;
  const int64_t* dims;
  int64_t strides[5];

  DenseArray(const XLA_FFI_Buffer& buffer, int64_t size, int64_t rank, const XLA_FFI_Buffer* layer)
      : data(static_cast<char*>(buffer.data)), dims(buffer.dims + (layer == nullptr ? 0 : 1)) {
    PC_ASSERT(buffer.rank == rank + (layer == nullptr ? 0 : 1));
    for (int64_t axis = rank - 1; axis >= 0; --axis) {
      strides[axis] = size;
      size *= dims[axis];
    }
    if (layer != nullptr) data += layer_number(*layer, buffer.dims[0]) * size;
  }
};

[[nodiscard]] inline SealedPlane plane_of(const DenseArray& words, const DenseArray& scales, Float type, int64_t bits) {
  SealedPlane plane;
  plane.words = words.data;
  plane.scales = scales.data;
  plane.scale_type = type;
  plane.bits = bits;
  plane.block_stride = words.strides[0];
  plane.scales_block_stride = scales.strides[0];
  return plane;
}

}  // namespace internal

// words [block, head, row, dim], scales [block, head, group, 2, dim]
[[nodiscard]] inline SealedPlane sealed_keys(const SealedPlanes& planes, const XLA_FFI_Buffer* layer, int64_t bits) {
  const Float type = float_type(*planes.key_scale);
  const internal::DenseArray words(*planes.key, 4, 4, layer), scales(*planes.key_scale, size_of(type), 5, layer);
  SealedPlane plane = internal::plane_of(words, scales, type, bits);
  plane.head_stride = words.strides[1];
  plane.row_stride = words.strides[2];
  plane.scales_head_stride = scales.strides[1];
  plane.scales_row_stride = scales.strides[2];
  plane.least_stride = scales.strides[3];
  plane.group = words.dims[2] * 32 / bits / scales.dims[2];
  return plane;
}

// words [block, token, head, word], scales [block, token, head, group, 2]
[[nodiscard]] inline SealedPlane sealed_values(const SealedPlanes& planes, const XLA_FFI_Buffer* layer, int64_t bits) {
  const Float type = float_type(*planes.value_scale);
  const internal::DenseArray words(*planes.value, 4, 4, layer), scales(*planes.value_scale, size_of(type), 5, layer);
  SealedPlane plane = internal::plane_of(words, scales, type, bits);
  plane.row_stride = words.strides[1];
  plane.head_stride = words.strides[2];
  plane.scales_row_stride = scales.strides[1];
  plane.scales_head_stride = scales.strides[2];
  plane.group_stride = scales.strides[3];
  plane.least_stride = scales.strides[4];
  plane.group = words.dims[3] * 32 / bits / scales.dims[3];
  return plane;
}

[[nodiscard]] inline int64_t num_sealed_blocks(const SealedPlanes& planes, const XLA_FFI_Buffer* layer) {
  return planes.key->dims[layer == nullptr ? 0 : 1];
}

}  // namespace pagecore::xla
