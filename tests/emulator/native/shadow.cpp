#include "shadow.hpp"

#include <bit>

namespace emulator {

namespace {

int thread_of(int warp, uint32_t lanes) { return warp * kLanes + std::countr_zero(lanes); }

bool written_by_another(const Shadow& shadow, const Accessor& accessor) {
  const int warp = shadow.writer / kLanes;
  if (shadow.written.block == 0) return false;
  if (shadow.shared) return shadow.written.block == accessor.now.block;
  if (is_ordered(shadow.written, warp, accessor)) return false;
  return warp != accessor.warp || accessor.lanes != 1u << shadow.writer % kLanes;
}

}  // namespace

Finding note_read(Shadow& shadow, const Accessor& reader, Site site) {
  if (shadow.in_flight)
    return {"reads what the copy of thread %d (line %u) has in flight", shadow.writer, shadow.write_site};
  if (shadow.written.block == 0) return {"reads uninitialised memory", 0, {}};
  if (written_by_another(shadow, reader)) {
    return {reader.lanes == ~0u ? "races: the warp reads what thread %d writes (line %u), without a barrier between"
                                : "races: it reads what thread %d writes (line %u), without a barrier between",
            shadow.writer, shadow.write_site};
  }
  if (shadow.read.block != reader.now.block) shadow.reader_warps = 0;
  if (shadow.reader_warps != 1u << reader.warp || shadow.read.warp != reader.now.warp) shadow.reader_lanes = 0;
  shadow.read = reader.now;
  shadow.reader_warps |= 1u << reader.warp;
  shadow.reader_lanes |= reader.lanes;
  shadow.read_site = site;
  return {};
}

Finding note_write(Shadow& shadow, const Accessor& writer, Site site) {
  if (shadow.in_flight)
    return {"writes what the copy of thread %d (line %u) has in flight", shadow.writer, shadow.write_site};
  if (written_by_another(shadow, writer)) {
    return {"races: it writes what thread %d writes (line %u), without a barrier between", shadow.writer,
            shadow.write_site};
  }
  if (shadow.read.block == writer.now.block) {
    const uint32_t others = shadow.reader_warps & ~(1u << writer.warp);
    const uint32_t lanes = shadow.read.warp == writer.now.warp ? shadow.reader_lanes & ~writer.lanes : 0;
    if (others != 0) {
      return {"races: it writes what thread %d or another of its warp reads (line %u), without a barrier between",
              thread_of(std::countr_zero(others), 1), shadow.read_site};
    }
    if (shadow.reader_warps != 0 && lanes != 0) {
      return {"races: it writes what thread %d reads (line %u), without a barrier between",
              thread_of(writer.warp, lanes), shadow.read_site};
    }
  }
  shadow.written = writer.now;
  shadow.writer = static_cast<uint16_t>(thread_of(writer.warp, writer.lanes));
  shadow.write_site = site;
  shadow.atomic = shadow.shared = false;
  return {};
}

Finding note_atomic(Shadow& shadow, const Accessor& writer, Site site) {
  if (!shadow.in_flight && shadow.written.block == 0) return {"reads uninitialised memory", 0, {}};
  const bool shares = shadow.atomic && written_by_another(shadow, writer);
  if (shares) {
    shadow.shared = false;
    shadow.writer = static_cast<uint16_t>(thread_of(writer.warp, writer.lanes));
  }
  const Finding finding = note_write(shadow, writer, site);
  shadow.atomic = true;
  shadow.shared = shares;
  return finding;
}

}  // namespace emulator
