#include "shadow.hpp"

namespace emulator {

Finding note_atomic(Shadow& shadow, const Accessor& writer, Site site) {
  if (!shadow.in_flight && shadow.written.block == 0) return {"reads uninitialised memory"};
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
