// The shared buffer of the running block, and the asynchronous copies that fill it.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "block.hpp"
#include "shadow.hpp"

namespace emulator {

namespace {

constexpr uint32_t kMaxShared = 1 << 18;

alignas(128) unsigned char buffer[kMaxShared];
uint32_t size;
// Most accesses are of 16 bytes: those of words have shadows of their own only after a smaller access.
std::vector<Shadow> vectors;
std::vector<Shadow> words;  // of vectors that are split
std::vector<Shadow> bytes;  // of words that are split

struct Copy {
  uint32_t offset;
  uint32_t num_bytes;
  uint64_t source;  // 0: zeros
  Site site;
};

// The copies of a thread in the order of issue. The first `landed` have finished; `groups` has the end of each group.
struct Copies {
  std::vector<Copy> copies;
  std::vector<size_t> groups;
  size_t landed = 0;
  size_t groups_landed = 0;
};
Copies copies_of[kMaxThreads];

void expect_inside(const char* what, int64_t offset, Extent extent, Site site) {
  const auto [num_bytes, alignment] = extent;
  if (offset < 0 || offset + num_bytes > size) {
    fail(site, "%s %u bytes at offset %lld of the shared buffer, which has %u bytes", what, num_bytes,
         static_cast<long long>(offset), size);
  }
  if (offset % alignment != 0) {
    fail(site, "%s %u bytes at offset %lld of the shared buffer, which is not a multiple of %u", what, num_bytes,
         static_cast<long long>(offset), alignment);
  }
}

[[noreturn]] void report(const Finding& finding, uint32_t offset, Site site) {
  char text[256];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
  std::snprintf(text, sizeof(text), finding.what, finding.thread, finding.line);
#pragma GCC diagnostic pop
  fail(site, "%s: offset %u of the shared buffer", text, offset);
}

void split_vector(uint32_t vector) {
  std::fill_n(words.begin() + vector * 4, 4, vectors[vector]);
  vectors[vector].split = true;
}

void split_word(uint32_t word) {
  std::fill_n(bytes.begin() + word * 4, 4, words[word]);
  words[word].split = true;
}

// Calls f(shadow, offset) for each word or byte of a part of a split vector.
template <typename F>
void for_each_word(uint32_t offset, uint32_t end, F f) {
  while (offset < end) {
    const uint32_t word = offset / 4;
    if (offset % 4 == 0 && end - offset >= 4 && !words[word].split) {
      f(words[word], offset);
      offset += 4;
      continue;
    }
    if (!words[word].split) split_word(word);
    const uint32_t stop = std::min(end, word * 4 + 4);
    for (; offset < stop; ++offset) f(bytes[offset], offset);
  }
}

// Returns the shadow of an access of a whole vector or word; null if there is none or several.
Shadow* only_shadow(uint32_t offset, uint32_t num_bytes) {
  Shadow& vector = vectors[offset / 16];
  if (!vector.split) return num_bytes == 16 && offset % 16 == 0 ? &vector : nullptr;
  if (num_bytes != 4 || offset % 4 != 0) return nullptr;
  Shadow& word = words[offset / 4];
  return word.split ? nullptr : &word;
}

// Calls f(shadow, offset) for each vector, word or byte of an access.
template <typename F>
void for_each(uint32_t offset, uint32_t num_bytes, F f) {
  if (Shadow* const only = only_shadow(offset, num_bytes)) return f(*only, offset);
  const uint32_t end = offset + num_bytes;
  while (offset < end) {
    const uint32_t vector = offset / 16;
    if (offset % 16 == 0 && end - offset >= 16 && !vectors[vector].split) {
      f(vectors[vector], offset);
      offset += 16;
      continue;
    }
    if (!vectors[vector].split) split_vector(vector);
    const uint32_t stop = std::min(end, vector * 16 + 16);
    for_each_word(offset, stop, f);
    offset = stop;
  }
}

// Joins the shadows of words and vectors that were written as a whole: no earlier access of them matters any more.
void join(uint32_t offset, uint32_t num_bytes) {
  const uint32_t end = offset + num_bytes;
  for (uint32_t word = (offset + 3) / 4; word * 4 + 4 <= end; ++word) {
    if (vectors[word / 4].split && words[word].split) words[word] = bytes[word * 4];
  }
  for (uint32_t vector = (offset + 15) / 16; vector * 16 + 16 <= end; ++vector) {
    if (vectors[vector].split) vectors[vector] = words[vector * 4];
  }
}

void read_as(const Accessor& reader, uint32_t offset, uint32_t num_bytes, Site site) {
  for_each(offset, num_bytes, [&](Shadow& shadow, uint32_t at) {
    const Finding finding = note_read(shadow, reader, site);
    if (finding.what != nullptr) [[unlikely]]
      report(finding, at, site);
  });
}

void write_as(const Accessor& writer, uint32_t offset, uint32_t num_bytes, bool in_flight, Site site) {
  for_each(offset, num_bytes, [&](Shadow& shadow, uint32_t at) {
    const Finding finding = note_write(shadow, writer, site);
    if (finding.what != nullptr) [[unlikely]]
      report(finding, at, site);
    shadow.in_flight = in_flight;
  });
  if (only_shadow(offset, num_bytes) == nullptr) join(offset, num_bytes);
}

void land(const Copy& copy) {
  if (copy.source != 0) {
    std::memcpy(buffer + copy.offset, reinterpret_cast<const void*>(copy.source), copy.num_bytes);
  } else {
    std::memset(buffer + copy.offset, 0, copy.num_bytes);
  }
  const Accessor writer = running_thread();
  for_each(copy.offset, copy.num_bytes, [&](Shadow& shadow, uint32_t) {
    shadow.in_flight = false;
    shadow.written = writer.now;
  });
}

}  // namespace

void begin_block_of_shared(uint32_t num_bytes) {
  size = num_bytes;
  std::memset(buffer, 0xFF, size);
  const size_t num_vectors = (size + 15) / 16;
  if (vectors.size() < num_vectors) {
    vectors.resize(num_vectors);
    words.resize(num_vectors * 4);
    bytes.resize(num_vectors * 16);
  }
  std::fill_n(vectors.begin(), num_vectors, Shadow{});
  for (int t = 0; t < kMaxThreads; ++t) {
    Copies& c = copies_of[t];
    if (c.copies.empty() && c.groups.empty()) continue;
    c.copies.clear();
    c.groups.clear();
    c.landed = c.groups_landed = 0;
  }
}

uint32_t shared_size() { return size; }

void read_shared(void* result, int64_t offset, Extent extent, Site site) {
  expect_inside("reads", offset, extent, site);
  read_as(running_thread(), static_cast<uint32_t>(offset), extent.num_bytes, site);
  copy_bytes(result, buffer + offset, extent.num_bytes);
}

void write_shared(const void* value, int64_t offset, Extent extent, Site site) {
  expect_inside("writes", offset, extent, site);
  write_as(running_thread(), static_cast<uint32_t>(offset), extent.num_bytes, false, site);
  copy_bytes(buffer + offset, value, extent.num_bytes);
}

int add_shared(int value, int64_t offset, Site site) {
  expect_inside("adds to", offset, extent_of<int>, site);
  for_each(static_cast<uint32_t>(offset), sizeof(int), [&](Shadow& shadow, uint32_t at) {
    const Finding finding = note_atomic(shadow, running_thread(), site);
    if (finding.what != nullptr) [[unlikely]]
      report(finding, at, site);
  });
  int before;
  std::memcpy(&before, buffer + offset, sizeof(int));
  const auto after = static_cast<int>(static_cast<uint32_t>(before) + static_cast<uint32_t>(value));
  std::memcpy(buffer + offset, &after, sizeof(int));
  return before;
}

const unsigned char* read_row(uint32_t address, Site site) {
  const int64_t offset = static_cast<int64_t>(address) - kSharedBase;
  expect_inside("reads", offset, {16, 16}, site);
  Accessor warp = running_thread();
  warp.lanes = ~0u;
  read_as(warp, static_cast<uint32_t>(offset), 16, site);
  return buffer + offset;
}

void copy_async(uint32_t target, uint64_t source, uint32_t num_bytes, const Allocation* made_from, bool valid,
                Site site) {
  if (valid) expect_copyable(source, num_bytes, made_from, site);
  const int64_t offset = static_cast<int64_t>(target) - kSharedBase;
  expect_inside("copies to", offset, {num_bytes, num_bytes}, site);
  write_as(running_thread(), static_cast<uint32_t>(offset), num_bytes, true, site);
  std::memset(buffer + offset, 0xFF, num_bytes);
  if (valid) counts.copied_bytes += num_bytes;
  copies_of[place.thread].copies.push_back({static_cast<uint32_t>(offset), num_bytes, valid ? source : 0, site});
}

void commit_copies() {
  Copies& c = copies_of[place.thread];
  c.groups.push_back(c.copies.size());
}

void wait_copies(int max_groups) {
  Copies& c = copies_of[place.thread];
  if (c.groups.size() - c.groups_landed <= static_cast<size_t>(max_groups)) return;
  c.groups_landed = c.groups.size() - max_groups;
  const size_t end = c.groups[c.groups_landed - 1];
  for (; c.landed < end; ++c.landed) land(c.copies[c.landed]);
}

void expect_no_copies() {
  const Copies& c = copies_of[place.thread];
  if (c.landed == c.copies.size()) return;
  fail(c.copies[c.landed].site, "finishes with %zu copies in flight; the first is from this line",
       c.copies.size() - c.landed);
}

}  // namespace emulator
