#include "service/heap.h"

#include <malloc.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace service {
namespace {

constexpr char kTunables[] = "GLIBC_TUNABLES";
constexpr char kOfTheHeap[] = "glibc.malloc.";

// By default a process has eight arenas a core.  What is free in one is of no use to a thread of
// another, and requests go from thread to thread: each arena grows to the most that its own threads
// have ever had at once, and the later the rarer such a moment is.
//
// And each thread keeps what it frees, up to seven blocks of each of 64 sizes: 230 KiB a thread,
// which no other thread gets and which TrimHeap cannot give back.  Those of rare sizes and quiet
// threads come together over days.  Blocks of the smallest sizes are most of all blocks and little
// memory: 16 KiB a thread are filled at once, and for these no thread waits at an arena's lock.
std::string Limits() {
  return absl::StrCat(kOfTheHeap, "arena_max=", kMaxHeapArenas, ":", kOfTheHeap,
                      "tcache_max=", kMaxThreadCachedBytes);
}

}  // namespace

void LimitHeap(char** argv) {
  // The C library takes the variable away from a program that runs with more rights than its user;
  // what /proc calls the program is the loader where that was called by hand.
  if (getauxval(AT_SECURE) != 0 || getauxval(AT_BASE) == 0) return;
  // Something may keep the other variable from this program: it begins anew once, not for ever.
  if (std::getenv(kBegunAnew) != nullptr) {
    unsetenv(kBegunAnew);
    return;
  }
  const char* const given = std::getenv(kTunables);
  const std::string others = given == nullptr ? "" : given;
  if (absl::StrContains(others, kOfTheHeap)) return;
  // By its path: as /proc/self/exe it would have the name "exe".
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return;
  const std::string all = others.empty() ? Limits() : absl::StrCat(others, ":", Limits());
  if (setenv(kBegunAnew, "1", /*overwrite=*/1) != 0) return;
  if (setenv(kTunables, all.c_str(), /*overwrite=*/1) == 0) execv(program.c_str(), argv);
  unsetenv(kBegunAnew);
}

void TrimHeap() { malloc_trim(0); }

}  // namespace service
