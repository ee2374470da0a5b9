// Primitives: every operation of the kernels that is not plain C++. Each has two bodies: PTX in this file, and a host
// body in tests/emulator/native for the emulator, which runs the kernels on the CPU. Kernels do not depend on the body.
//
// Kernels access memory only through:
//
//   Global<T>       an array in device memory, by element
//   Shared<T>       part of the one dynamic shared buffer of a block, by element
//   SharedAddress   a byte of that buffer, for cp.async and ldmatrix
//
// All 32 lanes of a warp must execute a collective (pc_sync_warp, shuffles, votes, matrix instructions), and all
// threads of a block must execute pc_sync_block.
#pragma once

#include "cuda_src/abi/types.h"

typedef unsigned char pc_uint8;
typedef unsigned short pc_uint16;
typedef unsigned int pc_uint32;
typedef unsigned long long pc_uint64;

// 16-bit floats, by their bits.
struct pc_half {
  pc_uint16 bits;
};
struct pc_bfloat16 {
  pc_uint16 bits;
};

// The largest unit that a thread loads or stores with one instruction.
struct alignas(16) pc_vector {
  pc_uint32 word[4];
};

#ifdef PC_EMULATED
#include "emulated_primitives.hpp"
#else

#define PC_DEVICE static __device__ __forceinline__
#define PC_MEMBER __device__ __forceinline__
// A kernel with blocks of `threads` threads, at least `blocks` of which must fit on a multiprocessor.
#define PC_KERNEL(threads, blocks) __global__ __launch_bounds__(threads, blocks)
#define PC_UNROLL _Pragma("unroll")
#define PC_NO_UNROLL _Pragma("unroll 1")

// ---- indices of a thread

PC_DEVICE int pc_thread() { return static_cast<int>(threadIdx.x); }
PC_DEVICE int pc_num_threads() { return static_cast<int>(blockDim.x); }
PC_DEVICE int pc_lane() { return static_cast<int>(threadIdx.x) & 31; }
PC_DEVICE int pc_warp() { return static_cast<int>(threadIdx.x) >> 5; }
PC_DEVICE int pc_block_x() { return static_cast<int>(blockIdx.x); }
PC_DEVICE int pc_block_y() { return static_cast<int>(blockIdx.y); }
PC_DEVICE int pc_block_z() { return static_cast<int>(blockIdx.z); }
PC_DEVICE int pc_num_blocks_x() { return static_cast<int>(gridDim.x); }
PC_DEVICE int pc_num_blocks_y() { return static_cast<int>(gridDim.y); }
PC_DEVICE int pc_num_blocks_z() { return static_cast<int>(gridDim.z); }

// ---- collectives

PC_DEVICE void pc_sync_block() { __syncthreads(); }
PC_DEVICE void pc_sync_warp() { __syncwarp(); }
PC_DEVICE float pc_shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
PC_DEVICE int pc_shuffle_xor(int value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
PC_DEVICE float pc_shuffle(float value, int lane) { return __shfl_sync(~0u, value, lane); }
PC_DEVICE int pc_shuffle(int value, int lane) { return __shfl_sync(~0u, value, lane); }
// Returns the value of the lane `delta` below; the lane's own value if there is no such lane.
PC_DEVICE int pc_shuffle_up(int value, int delta) { return __shfl_up_sync(~0u, value, delta); }
// Returns one bit for each lane: its `condition`.
PC_DEVICE pc_uint32 pc_ballot(bool condition) { return __ballot_sync(~0u, condition); }

// ---- device memory

template <typename T>
class Global {
 public:
  PC_MEMBER Global() : data_(nullptr) {}
  // Because of the conversion, the compiler emits loads and stores of device memory instead of generic ones.
  PC_MEMBER explicit Global(pc_address address) : data_(static_cast<T*>(__cvta_global_to_generic(address))) {}

  PC_MEMBER explicit operator bool() const { return data_ != nullptr; }
  PC_MEMBER Global operator+(pc_int64 count) const { return Global(data_ + count); }
  PC_MEMBER pc_address address() const { return reinterpret_cast<pc_address>(data_); }
  template <typename U>
  PC_MEMBER Global<U> as() const {
    return Global<U>(address());
  }

  PC_MEMBER T load(pc_int64 i) const { return data_[i]; }
  PC_MEMBER void store(pc_int64 i, T value) const { data_[i] = value; }
  // A load and a store by one predicated instruction instead of a branch. Without `condition` the load returns 0. Only
  // for 64-bit elements.
  PC_MEMBER T load_if(bool condition, pc_int64 i) const {
    T value;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; mov.b64 %0, 0; @p ld.global.b64 %0, [%1];}"
                 : "=l"(value)
                 : "l"(data_ + i), "r"(static_cast<int>(condition))
                 : "memory");
    return value;
  }
  PC_MEMBER void store_if(bool condition, pc_int64 i, T value) const {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.b64 [%0], %1;}" ::"l"(data_ + i), "l"(value),
                 "r"(static_cast<int>(condition))
                 : "memory");
  }
  // Access to 16 bytes from element i on, whose address must be a multiple of 16.
  PC_MEMBER pc_vector load_vector(pc_int64 i) const { return *reinterpret_cast<const pc_vector*>(data_ + i); }
  PC_MEMBER void store_vector(pc_int64 i, pc_vector value) const { *reinterpret_cast<pc_vector*>(data_ + i) = value; }
  // load_vector for bytes that are not read again soon, and that no thread writes during the kernel.
  PC_MEMBER pc_vector load_vector_once(pc_int64 i) const {
    pc_vector v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(data_ + i));
    return v;
  }

  // Adds to an element and returns its previous value; only for T = int.
  PC_MEMBER T atomic_add(pc_int64 i, T value) const { return atomicAdd(data_ + i, value); }
  // Replaces an element by its minimum with `value`; only for T = unsigned long long.
  PC_MEMBER void atomic_min(pc_int64 i, T value) const { atomicMin(data_ + i, value); }

 private:
  PC_MEMBER explicit Global(T* data) : data_(data) {}
  template <typename U>
  friend class Global;
  T* data_;
};

// Fence of the device: a thread that observes a later write of this thread also observes its earlier writes.
PC_DEVICE void pc_fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- shared memory

typedef pc_uint32 SharedAddress;

template <typename T>
class Shared {
 public:
  PC_MEMBER explicit Shared(void* data) : data_(static_cast<T*>(data)) {}

  PC_MEMBER Shared operator+(int count) const { return Shared(data_ + count); }
  // Returns the same bytes as elements of another type.
  template <typename U>
  PC_MEMBER Shared<U> as() const {
    return Shared<U>(data_);
  }
  PC_MEMBER T load(int i) const { return data_[i]; }
  PC_MEMBER void store(int i, T value) const { data_[i] = value; }
  PC_MEMBER pc_vector load_vector(int i) const { return *reinterpret_cast<const pc_vector*>(data_ + i); }
  PC_MEMBER void store_vector(int i, pc_vector value) const { *reinterpret_cast<pc_vector*>(data_ + i) = value; }
  // Adds to an element and returns its previous value; only for T = int. Atomic with other atomic_add alone.
  PC_MEMBER T atomic_add(int i, T value) const { return atomicAdd(data_ + i, value); }
  PC_MEMBER SharedAddress address(int i) const {
    return static_cast<SharedAddress>(__cvta_generic_to_shared(data_ + i));
  }

 private:
  T* data_;
};

// Returns the block's dynamic shared buffer, whose size is an argument of the launch. Its address is a multiple of 128.
PC_DEVICE Shared<pc_uint8> pc_shared_buffer() {
  extern __shared__ __align__(128) pc_uint8 buffer[];
  return Shared<pc_uint8>(buffer);
}

// Returns `value`, hidden from the optimiser: numbers derived from the result are computed after this point, not before
// a loop, where they would occupy registers.
PC_DEVICE int pc_opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// ---- asynchronous copies from device to shared memory

// Copies 16 bytes from element i on; writes zeros, and reads nothing, if not `valid`. The thread must not access the
// target before it waits for the copy, and other threads not before a barrier after that wait.
template <typename T>
PC_DEVICE void pc_copy_async(SharedAddress target, const Global<T>& source, pc_int64 i, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"((source + i).address()),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same for 4 bytes from byte i on, at a multiple of 4. The bytes are cached in L1.
PC_DEVICE void pc_copy_word_async(SharedAddress target, const Global<pc_uint8>& source, pc_int64 i, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"((source + i).address()),
               "r"(valid ? 4 : 0)
               : "memory");
}
// Commits the copies that this thread has started since the last commit as one group.
PC_DEVICE void pc_commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread are in flight.
template <int N>
PC_DEVICE void pc_wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- matrices

// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8, and receives
// from each matrix the elements (l / 4, 2 * (l % 4)) and (l / 4, 2 * (l % 4) + 1).
PC_DEVICE void pc_load_matrices(pc_uint32 (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// Loads the transposes of four matrices.
PC_DEVICE void pc_load_matrices_transposed(pc_uint32 (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// c += a * b: 16 x 8 += 16 x 16 * 16 x 8, sums in float32. With g = lane / 4 and q = lane % 4 a lane holds
//
//   a[0] (g, 2q)  a[1] (g + 8, 2q)  a[2] (g, 2q + 8)  a[3] (g + 8, 2q + 8)    each with its right neighbour
//   b0 (2q, g)  b1 (2q + 8, g)                                                each with the element below
//   c[0] (g, 2q)  c[1] (g, 2q + 1)  c[2] (g + 8, 2q)  c[3] (g + 8, 2q + 1)
template <typename T>
PC_DEVICE void pc_multiply(float (&c)[4], const pc_uint32 (&a)[4], pc_uint32 b0, pc_uint32 b1);

template <>
__device__ __forceinline__ void pc_multiply<pc_bfloat16>(float (&c)[4], const pc_uint32 (&a)[4], pc_uint32 b0,
                                                         pc_uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void pc_multiply<pc_half>(float (&c)[4], const pc_uint32 (&a)[4], pc_uint32 b0,
                                                     pc_uint32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- numbers

PC_DEVICE float pc_to_float(float value) { return value; }
PC_DEVICE float pc_to_float(pc_bfloat16 value) { return __uint_as_float(static_cast<pc_uint32>(value.bits) << 16); }
PC_DEVICE float pc_to_float(pc_half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// Packs two floats as adjacent elements of a 16-bit type, rounded to nearest even; `low` has the lower address.
template <typename T>
PC_DEVICE pc_uint32 pc_pack(float low, float high);
template <>
__device__ __forceinline__ pc_uint32 pc_pack<pc_bfloat16>(float low, float high) {
  pc_uint32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
__device__ __forceinline__ pc_uint32 pc_pack<pc_half>(float low, float high) {
  pc_uint32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// Rounds to nearest even.
template <typename T>
PC_DEVICE T pc_from_float(float value);
template <>
__device__ __forceinline__ float pc_from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ pc_bfloat16 pc_from_float<pc_bfloat16>(float value) {
  return {static_cast<pc_uint16>(pc_pack<pc_bfloat16>(value, 0.0f))};
}
template <>
__device__ __forceinline__ pc_half pc_from_float<pc_half>(float value) {
  return {static_cast<pc_uint16>(pc_pack<pc_half>(value, 0.0f))};
}

// Returns four of the eight bytes of `a` (0 to 3) and `b` (4 to 7): byte i is the one that digit i of `digits` names.
PC_DEVICE pc_uint32 pc_permute(pc_uint32 a, pc_uint32 b, pc_uint32 digits) { return __byte_perm(a, b, digits); }

// a * b + c of two adjacent halves, each rounded once.
PC_DEVICE pc_uint32 pc_fma_halves(pc_uint32 a, pc_uint32 b, pc_uint32 c) {
  pc_uint32 result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// True if the architecture has pc_convert_e4m3.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool pc_converts_e4m3 = true;
#else
constexpr bool pc_converts_e4m3 = false;
#endif
// Converts the two e4m3 codes in the low 16 bits to halves; the low code has the lower address.
PC_DEVICE pc_uint32 pc_convert_e4m3(pc_uint32 codes) {
  pc_uint32 result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(static_cast<pc_uint16>(codes)));
  return result;
}

// Returns the number of bits that are 1.
PC_DEVICE int pc_count_bits(pc_uint32 bits) { return __popc(bits); }
PC_DEVICE float pc_bits_to_float(pc_uint32 bits) { return __uint_as_float(bits); }
PC_DEVICE pc_uint32 pc_float_to_bits(float value) { return __float_as_uint(value); }
PC_DEVICE float pc_infinity() { return __uint_as_float(0x7f800000u); }
PC_DEVICE float pc_max(float a, float b) { return fmaxf(a, b); }
PC_DEVICE float pc_fma(float a, float b, float c) { return fmaf(a, b, c); }
// Powers and logarithms to base 2, within two units in the last place; pc_exp2(-inf) is 0, and pc_log2(0) is -inf.
PC_DEVICE float pc_exp2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
PC_DEVICE float pc_log2(float value) {
  float result;
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

#endif  // PC_EMULATED
