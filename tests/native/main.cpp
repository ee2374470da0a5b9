// Main program of every driver.
//
//   driver [--seed N] [--scale X] [--only TEXT] [--round N]   runs the tests, or those whose name contains TEXT
//   driver --list | --plants                                  lists tests, or planted faults with their reports
//   driver --plant NAME                                       runs a planted fault; dies if the sanitizer works
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "tests/native/harness.hpp"

namespace pagecore::test {
namespace {

struct Test {
  const char* name;
  void (*body)();
};

struct Plant {
  std::string name;
  std::string report;
  std::function<void()> body;
};

struct Driver {
  std::vector<Test> tests;
  std::vector<Plant> plants;
  uint64_t seed = 1;
  double scale = 1.0;
  int64_t only_round = -1;
  std::string only;
  // The current test and round; threads of a test read them when they fail.
  const char* test = "none";
  int64_t round = 0;
  int64_t num_rounds = 0;
};

Driver& driver() {
  static Driver the;
  return the;
}

uint64_t mixed(uint64_t seed, const char* name, int64_t round) {
  uint64_t hash = 0xcbf29ce484222325 ^ seed;  // FNV-1a
  for (; *name != '\0'; ++name) hash = (hash ^ static_cast<unsigned char>(*name)) * 0x100000001b3;
  return Random(hash + static_cast<uint64_t>(round)).bits();
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void run(const Test& test) {
  Driver& the = driver();
  the.test = test.name;
  the.num_rounds = 0;
  const double start = seconds();
  try {
    test.body();
  } catch (const std::exception& error) {
    fail_check("main.cpp", __LINE__, "a test must not throw", error.what());
  }
  std::printf("  %-62s %6lld rounds %6.2f s\n", test.name, static_cast<long long>(the.num_rounds), seconds() - start);
  std::fflush(stdout);
}

int run_all(const char* program) {
  const Driver& the = driver();
  const char* slash = std::strrchr(program, '/');
  std::printf("%s: seed %llu, scale %g\n", slash != nullptr ? slash + 1 : program,
              static_cast<unsigned long long>(the.seed), the.scale);
  int64_t num_run = 0;
  for (const Test& test : the.tests) {
    if (std::string(test.name).find(the.only) == std::string::npos) continue;
    run(test);
    ++num_run;
  }
  std::printf("%lld tests passed\n", static_cast<long long>(num_run));
  return num_run > 0 ? 0 : 2;
}

int plant(const char* name) {
  for (const Plant& each : driver().plants) {
    if (each.name != name) continue;
    each.body();
    std::fprintf(stderr, "the planted fault \"%s\" went unnoticed\n", name);
    return 0;
  }
  std::fprintf(stderr, "unknown planted fault \"%s\"; --plants lists them\n", name);
  return 0;  // expect_fault.sh treats 0 as a failure
}

int list(bool plants) {
  const Driver& the = driver();
  for (const Test& each : the.tests) {
    if (!plants) std::printf("%s\n", each.name);
  }
  for (const Plant& each : the.plants) {
    if (plants) std::printf("%s\t%s\n", each.name.c_str(), each.report.c_str());
  }
  return 0;
}

int usage(const char* argument) {
  std::fprintf(stderr, "unknown option or missing value: \"%s\"; see the head of tests/native/main.cpp\n", argument);
  return 2;
}

}  // namespace

Registered::Registered(const char* name, void (*body)()) { driver().tests.push_back({name, body}); }

Planted::Planted(std::string name, std::string report, std::function<void()> body) {
  driver().plants.push_back({std::move(name), std::move(report), std::move(body)});
}

void fail_check(const char* file, int line, const char* condition, const std::string& detail) {
  const Driver& the = driver();
  std::fflush(stdout);
  std::fprintf(stderr, "%s:%d: failed: %s\n  %s\n  again with: --seed %llu --only %s --round %lld\n", file, line,
               condition, detail.c_str(), static_cast<unsigned long long>(the.seed), the.test,
               static_cast<long long>(the.round));
  std::fflush(stderr);
  std::_Exit(1);
}

void rounds(int64_t count, const std::function<void(Random&)>& body) {
  Driver& the = driver();
  const auto scaled = static_cast<int64_t>(static_cast<double>(count) * the.scale);
  const int64_t first = the.only_round < 0 ? 0 : the.only_round;
  const int64_t end = the.only_round < 0 ? (scaled > 0 ? scaled : 1) : the.only_round + 1;
  for (the.round = first; the.round < end; ++the.round) {
    Random random(mixed(the.seed, the.test, the.round));
    body(random);
    ++the.num_rounds;
  }
}

}  // namespace pagecore::test

int main(int argc, char** argv) {
  using namespace pagecore::test;
  Driver& the = driver();
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--list" || option == "--plants") return list(option == "--plants");
    if (i + 1 == argc) return usage(argv[i]);
    const char* value = argv[++i];
    if (option == "--plant") return plant(value);
    if (option == "--seed") {
      the.seed = std::strtoull(value, nullptr, 0);
    } else if (option == "--scale") {
      the.scale = std::strtod(value, nullptr);
    } else if (option == "--only") {
      the.only = value;
    } else if (option == "--round") {
      the.only_round = std::strtoll(value, nullptr, 0);
    } else {
      return usage(argv[i - 1]);
    }
  }
  return run_all(argv[0]);
}
