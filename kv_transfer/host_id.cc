#include "kv_transfer/host_id.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

std::string HostId() {
  std::string id;
  std::ifstream boot_id("/proc/sys/kernel/random/boot_id");
  if (!std::getline(boot_id, id) || id.empty()) id = Epoch::Random().ToHex();
  for (const char* const name : {"ipc", "pid", "user"}) {
    struct stat info {};
    if (stat(absl::StrCat("/proc/self/ns/", name).c_str(), &info) == 0) {
      absl::StrAppend(&id, " ", name, ":", info.st_ino);
    } else {
      absl::StrAppend(&id, " ", name, ":", Epoch::Random().ToHex());
    }
  }
  absl::StrAppend(&id, " uid:", geteuid());
  return id;
}

}  // namespace kv_transfer
