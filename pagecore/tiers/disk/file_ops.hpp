// The system calls of the disk store, as a table, so that tests put faults between the store and the file.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>

namespace pagecore::tiers {

// Transfers of `count` parts at an offset of a file. Both return the number of bytes moved, or -errno. They are called
// from several threads at once, without any lock held except, for entries, that of one table.
struct FileOps {
  int64_t (*read)(int fd, const iovec* parts, int count, int64_t offset);
  int64_t (*write)(int fd, const iovec* parts, int count, int64_t offset);
};

// preadv and pwritev.
[[nodiscard]] const FileOps& system_file_ops() noexcept;

// Reads or writes all bytes of two parts, continuing after short transfers. Returns 0 or an errno: EIO at the end of
// the file, ENOSPC if a write moves nothing. The parts are changed.
[[nodiscard]] int move_all(const FileOps& ops, bool is_write, int fd, iovec (&parts)[2], int64_t offset) noexcept;

}  // namespace pagecore::tiers
