#include "pagecore/tiers/disk/file_ops.hpp"

#include <cerrno>

namespace pagecore::tiers {
namespace {

int64_t system_read(int fd, const iovec* parts, int count, int64_t offset) {
  const ssize_t moved = preadv(fd, parts, count, offset);
  return moved < 0 ? -errno : moved;
}

int64_t system_write(int fd, const iovec* parts, int count, int64_t offset) {
  const ssize_t moved = pwritev(fd, parts, count, offset);
  return moved < 0 ? -errno : moved;
}

// Removes the first `moved` bytes.
void advance(iovec (&parts)[2], size_t moved) {
  for (iovec& part : parts) {
    const size_t taken = moved < part.iov_len ? moved : part.iov_len;
    part.iov_base = static_cast<char*>(part.iov_base) + taken;
    part.iov_len -= taken;
    moved -= taken;
  }
}

}  // namespace

const FileOps& system_file_ops() noexcept {
  static constexpr FileOps ops{system_read, system_write};
  return ops;
}

int move_all(const FileOps& ops, bool is_write, int fd, iovec (&parts)[2], int64_t offset) noexcept {
  while (true) {
    const size_t left = parts[0].iov_len + parts[1].iov_len;
    if (left == 0) return 0;
    const int first = parts[0].iov_len == 0 ? 1 : 0;
    const int count = 2 - first - (parts[1].iov_len == 0 ? 1 : 0);
    const int64_t moved = (is_write ? ops.write : ops.read)(fd, parts + first, count, offset);
    if (moved == -EINTR) continue;
    if (moved < 0) return static_cast<int>(-moved);
    if (moved == 0) return is_write ? ENOSPC : EIO;
    if (static_cast<uint64_t>(moved) > left) return EIO;
    advance(parts, static_cast<size_t>(moved));
    offset += moved;
  }
}

}  // namespace pagecore::tiers
