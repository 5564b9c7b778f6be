#include "input_file/input_file.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "status/status_macros.h"

namespace input_file {

absl::Status Check(const std::string& path) {
  std::error_code why, ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, why);
  if (std::filesystem::is_regular_file(status)) return absl::OkStatus();
  if (std::filesystem::exists(status)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  if (std::filesystem::is_symlink(std::filesystem::symlink_status(path, ignored))) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a link that leads to no file"));
  }
  if (status.type() != std::filesystem::file_type::not_found) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", why.message()));
  }
  return absl::NotFoundError(absl::StrCat("no such file: ", path));
}

bool IsThere(const std::string& path) { return !absl::IsNotFound(Check(path)); }

absl::StatusOr<std::string> Read(const std::string& path, int64_t max_bytes) {
  RETURN_IF_ERROR(Check(path));
  std::error_code error;
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path, error));
  if (error || size > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected at most ", max_bytes, " bytes, found ", error ? -1 : size));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<size_t>(size), '\0');
  file.read(text.data(), size);
  if (!file || file.gcount() != size) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be read"));
  }
  return text;
}

}  // namespace input_file
