#include "pagecore/ops/cpu/dispatch.hpp"

#include <atomic>
#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "pagecore/native/checks.hpp"

namespace pagecore::cpu {
namespace {

struct Level {
  const char* name;
  bool (*supported)();
  const KernelTable& (*table)();
  bool (*is_slow)() = [] { return false; };  // true if a narrower level takes less time on this machine
};

template <const KernelTable& kTable>
const KernelTable& table_of() {
  return kTable;
}

// Widest first.
#if defined(__x86_64__)
bool has_v4() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_v2() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt"); }
// Byte lookups (VBMI) and integer products (VNNI): Ice Lake and its successors, Zen 4 and its successors. Cooper Lake
// has the products alone.
bool has_v4_vnni() { return has_v4() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni"); }
bool has_v4_bf16() { return has_v4_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Intel's processors multiply a vector of pairs in two cycles, and four vectors of float32: without AMX, the kernels
// without pairs take less time.
bool multiplies_pairs_slowly() { return __builtin_cpu_is("intel"); }

// Zen 5 and later. The compiler's names of processors end with Zen 3.
[[maybe_unused]] bool is_zen5() {
  constexpr unsigned kZen5 = 0x1a;
  unsigned signature, b, c, d;
  if (!__builtin_cpu_is("amd") || __get_cpuid(1, &signature, &b, &c, &d) == 0) return false;
  return (signature >> 8 & 15) + (signature >> 20 & 255) >= kZen5;
}

// Linux grants a process the AMX tile state only on request, once for all of its threads and children.
[[maybe_unused]] bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

bool has_v4_amx() {
#if defined(PC_AMX_EMULATED)
  return has_v4_bf16();
#else
  return has_v4_bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && may_use_tiles();
#endif
}

// The kernels without tiles are compiled once for both levels. Joined at the first use: other files may ask for the
// levels while their own objects are initialised.
const KernelTable& tiles_table() {
  static const KernelTable joined = [] {
    if (v4_amx::kTable.attend == nullptr) return KernelTable{};
    KernelTable table = v4_bf16::kTable;
    table.attend = v4_amx::kTable.attend;
    table.merge_splits = v4_amx::kTable.merge_splits;
    table.clear = v4_amx::kTable.clear;
    table.latent = v4_amx::kTable.latent;
    return table;
  }();
  return joined;
}

// The kernels of v4_bf16 without pairs of bfloat16, and the latent kernels of v4.
const KernelTable& vnni_table() {
  static const KernelTable joined = [] {
    if (v4_bf16::kTableWithoutPairs.attend == nullptr || v4::kTable.attend == nullptr) return KernelTable{};
    KernelTable table = v4_bf16::kTableWithoutPairs;
    table.latent = v4::kTable.latent;
    return table;
  }();
  return joined;
}

constexpr Level kLevels[] = {{"x86-64-v4-amx", has_v4_amx, tiles_table},
                             {"x86-64-v4-bf16", has_v4_bf16, table_of<v4_bf16::kTable>, multiplies_pairs_slowly},
                             {"x86-64-v4-vnni", has_v4_vnni, vnni_table},
                             {"x86-64-v4", has_v4, table_of<v4::kTable>},
                             {"x86-64-v3", has_v3, table_of<v3::kTable>},
                             {"x86-64-v2", has_v2, table_of<v2::kTable>}};
#elif defined(__aarch64__)
constexpr Level kLevels[] = {{"neon", [] { return true; }, table_of<neon::kTable>}};
#else
#error "pagecore's host kernels are written for x86-64 and aarch64"
#endif

// Tables of instruction sets that the build leaves out are empty.
bool available(const Level& level) { return level.table().attend != nullptr && level.supported(); }

// Null until first use.
std::atomic<const Level*> current{nullptr};

[[noreturn]] void refuse(const std::string& name, const char* who) {
  std::string names;
  for (const std::string& each : available_isas()) names += (names.empty() ? "" : ", ") + each;
  fail(ErrorKind::UnsupportedOption, who, ": instruction set \"", name,
       "\" is not available on this machine or in this build; available: ",
       names.empty() ? "none (the kernels need x86-64-v2)" : names);
}

const Level& find(const std::string& name, const char* who) {
  for (const Level& level : kLevels) {
    if (name == level.name && available(level)) return level;
  }
  refuse(name, who);
}

const Level& from_environment() {
  const char* wanted = std::getenv("PAGECORE_ISA");
  if (wanted != nullptr && *wanted != '\0') return find(wanted, "PAGECORE_ISA");
  const Level* widest = nullptr;
  for (const Level& level : kLevels) {
    if (!available(level)) continue;
    if (!level.is_slow()) return level;
    if (widest == nullptr) widest = &level;
  }
  if (widest != nullptr) return *widest;
  refuse("x86-64-v2", "pagecore");
}

const Level& level() {
  const Level* known = current.load(std::memory_order_relaxed);
  if (known == nullptr) {
    known = &from_environment();
    current.store(known, std::memory_order_relaxed);
  }
  return *known;
}

}  // namespace

const KernelTable& kernels() { return level().table(); }

const char* isa() { return level().name; }

bool reads_by_pages() {
#if defined(PC_AMX_EMULATED)
  return true;  // so that the drivers of tests/native run these kernels on every machine
#elif defined(__x86_64__)
  static const bool reads = is_zen5();
  return reads;
#else
  return false;
#endif
}

void set_isa(const std::string& name) {
  current.store(name.empty() ? &from_environment() : &find(name, "set_isa"), std::memory_order_relaxed);
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Level& level : kLevels) {
    if (available(level)) names.emplace_back(level.name);
  }
  return names;
}

}  // namespace pagecore::cpu
