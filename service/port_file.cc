#include "service/port_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace service {
namespace {

absl::Status PortFileError(const std::string& path, const std::string& cause) {
  return absl::UnavailableError(
      absl::StrCat("cannot write port file ", path, ": ", absl::AsciiStrToLower(cause)));
}

}  // namespace

absl::Status WritePorts(const std::string& path,
                        const std::vector<std::pair<std::string, int32_t>>& ports) {
  if (path.empty()) return absl::OkStatus();
  const std::string unfinished = path + ".tmp";
  errno = 0;
  std::ofstream file(unfinished, std::ios::trunc);
  for (const auto& [name, port] : ports) file << name << "=" << port << "\n";
  file.close();
  if (!file.good()) return PortFileError(path, std::generic_category().message(errno));
  std::error_code error;
  std::filesystem::rename(unfinished, path, error);
  return error ? PortFileError(path, error.message()) : absl::OkStatus();
}

absl::Status WritePortFile(const std::string& path, int32_t grpc_port, int32_t metrics_port) {
  return WritePorts(path, {{"grpc_port", grpc_port}, {"metrics_port", metrics_port}});
}

absl::Status CheckPortFile(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return PortFileError(path, "is a directory");
  const std::string unfinished = path + ".tmp";
  const int fd = open(unfinished.c_str(), O_WRONLY | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0644);
  if (fd < 0) return PortFileError(path, std::generic_category().message(errno));
  close(fd);
  unlink(unfinished.c_str());
  return absl::OkStatus();
}

}  // namespace service
