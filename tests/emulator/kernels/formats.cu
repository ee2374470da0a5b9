// Kernels that test the conversions of stored codes.
#include "cuda_src/device/formats.cuh"
#include "probe.h"

namespace pagecore {

// in: pairs of codes, pc_uint16 [n], of which packed formats use the low byte. m: format + 32 * zero point; format 16
// is e4m3 without an instruction. out: float [n][2]
PC_KERNEL(256, 1) void widen_codes(const PcProbe params) {
  const int i = pc_block_x() * pc_num_threads() + pc_thread();
  if (i >= params.n) return;
  const pc_uint32 codes = Global<pc_uint16>(params.in).load(i);
  const PcFormat format = static_cast<PcFormat>(params.m % 32);
  const pc_uint32 pair = params.m % 32 == 16 ? e4m3_by_bits(codes) : halves_of_codes(format, codes, params.m / 32);
  Global<float>(params.out).store(2 * i, low_half(pair));
  Global<float>(params.out).store(2 * i + 1, high_half(pair));
}

// in: float [n], out: pc_uint8 [n][3]: e4m3, e5m2, e2m1
PC_KERNEL(256, 1) void narrow_to_codes(const PcProbe params) {
  const int i = pc_block_x() * pc_num_threads() + pc_thread();
  if (i >= params.n) return;
  const float x = Global<float>(params.in).load(i);
  const Global<pc_uint8> out(params.out);
  out.store(3 * i, static_cast<pc_uint8>(e4m3_of(x)));
  out.store(3 * i + 1, static_cast<pc_uint8>(e5m2_of(x)));
  out.store(3 * i + 2, static_cast<pc_uint8>(e2m1_of(x)));
}

}  // namespace pagecore
