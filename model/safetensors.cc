#include "model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "input_file/input_file.h"
#include "model/json.h"
#include "model/random_tensors.h"
#include "model/safetensors_header.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"

namespace model {
namespace {

constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;
constexpr int64_t kLengthBytes = 8;  // of the header, little-endian
constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";

std::string BaseName(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

}  // namespace

// A read-only mapping of a whole file, and aligned copies of the tensors that lie crooked in it.
class Checkpoint::MappedFile {
 public:
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::string& path) {
    RETURN_IF_ERROR(input_file::Check(path));
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
      const std::string reason = std::strerror(errno);
      return absl::NotFoundError(absl::StrCat(path, ": cannot be opened: ", reason));
    }
    struct stat info = {};
    if (fstat(fd, &info) != 0 || info.st_size < kLengthBytes) {
      close(fd);
      return absl::InvalidArgumentError(absl::StrCat(
          BaseName(path), ": expected a safetensors file, found ", info.st_size, " bytes"));
    }
    void* data = mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    const std::string reason = std::strerror(errno);
    close(fd);
    if (data == MAP_FAILED) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be mapped: ", reason));
    }
    return std::unique_ptr<MappedFile>(
        new MappedFile(static_cast<const std::byte*>(data), info.st_size));
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() { munmap(const_cast<std::byte*>(data_), size_); }

  const std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

  void ReleasePages() const { madvise(const_cast<std::byte*>(data_), size_, MADV_DONTNEED); }

  const std::byte* AlignedCopy(const std::byte* data, int64_t size) {
    copies_.push_back(std::make_unique<std::byte[]>(size));
    std::memcpy(copies_.back().get(), data, size);
    return copies_.back().get();
  }

 private:
  MappedFile(const std::byte* data, int64_t size) : data_(data), size_(size) {}

  const std::byte* data_;
  int64_t size_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;
};

Checkpoint::Checkpoint() = default;
Checkpoint::~Checkpoint() = default;

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& model_dir) {
  std::error_code error;
  if (!std::filesystem::is_directory(model_dir, error)) {
    return absl::NotFoundError(absl::StrCat("no such directory: ", model_dir));
  }
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint());
  checkpoint->origin_ = model_dir;
  const std::string single = absl::StrCat(model_dir, "/", kSingleFile);
  const std::string index = absl::StrCat(model_dir, "/", kIndexFile);
  if (input_file::IsThere(single)) {
    RETURN_IF_ERROR(checkpoint->AddFile(single));
  } else if (input_file::IsThere(index)) {
    RETURN_IF_ERROR(checkpoint->AddShards(model_dir, index));
  } else {
    return absl::NotFoundError(
        absl::StrCat(model_dir, " holds neither ", kSingleFile, " nor ", kIndexFile));
  }
  return checkpoint;
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::OpenFile(const std::string& path) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint());
  checkpoint->origin_ = path;
  RETURN_IF_ERROR(checkpoint->AddFile(path));
  return checkpoint;
}

std::unique_ptr<Checkpoint> Checkpoint::Random(const ModelConfig& config) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint());
  checkpoint->origin_ = "random weights";
  checkpoint->random_ = std::make_unique<RandomTensors>(config);
  return checkpoint;
}

absl::StatusOr<const TensorView*> Checkpoint::Get(const std::string& name,
                                                  const std::vector<int64_t>& shape) const {
  if (random_ != nullptr) return random_->Get(name, shape);
  return Get(name);
}

const TensorView* Checkpoint::FindMatrix(const std::string& name, int64_t rows,
                                         int64_t cols) const {
  return random_ != nullptr ? random_->GetMatrix(name, rows, cols) : Find(name);
}

const TensorView* Checkpoint::Find(std::string_view name) const {
  if (random_ != nullptr) return random_->Find(name);
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

absl::StatusOr<const TensorView*> Checkpoint::Get(std::string_view name) const {
  const TensorView* tensor = Find(name);
  if (tensor != nullptr) return tensor;
  return absl::NotFoundError(absl::StrCat(origin_, ": tensor ", std::string(name), " is missing"));
}

void Checkpoint::ReleasePages() const {
  for (const std::unique_ptr<MappedFile>& file : files_) file->ReleasePages();
}

absl::Status Checkpoint::AddFile(const std::string& path) {
  const std::string file = BaseName(path);
  ASSIGN_OR_RETURN(std::unique_ptr<MappedFile> mapped, MappedFile::Open(path));
  uint64_t header_bytes = 0;
  static_assert(sizeof(header_bytes) == kLengthBytes);
  std::memcpy(&header_bytes, mapped->data(), kLengthBytes);
  const int64_t limit = std::min(kMaxHeaderBytes, mapped->size() - kLengthBytes);
  if (header_bytes > static_cast<uint64_t>(limit)) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": expected a header of at most ", limit,
                                                   " bytes, found a length of ", header_bytes));
  }
  const auto* header = reinterpret_cast<const char*>(mapped->data()) + kLengthBytes;
  const int64_t data_offset = kLengthBytes + static_cast<int64_t>(header_bytes);
  ASSIGN_OR_RETURN(
      std::vector<HeaderTensor> tensors,
      ParseSafetensorsHeader({header, header_bytes}, mapped->size() - data_offset, file));
  for (HeaderTensor& tensor : tensors) {
    const std::byte* data = mapped->data() + data_offset + tensor.begin;
    const int64_t size = tensor.end - tensor.begin;
    if (reinterpret_cast<uintptr_t>(data) % tensor.element_bytes != 0) {
      data = mapped->AlignedCopy(data, size);
    }
    TensorView view{.name = tensor.name,
                    .dtype = tensor.dtype,
                    .dtype_name = std::move(tensor.dtype_name),
                    .shape = std::move(tensor.shape),
                    .data = {data, static_cast<size_t>(size)},
                    .file = file};
    const auto [place, inserted] = tensors_.emplace(tensor.name, std::move(view));
    if (!inserted) {
      return absl::InvalidArgumentError(absl::StrCat(file, ": tensor ", tensor.name,
                                                     ": expected in one file, found in ",
                                                     place->second.file, " too"));
    }
    total_bytes_ += size;
  }
  files_.push_back(std::move(mapped));
  return absl::OkStatus();
}

absl::Status Checkpoint::AddShards(const std::string& model_dir, const std::string& index_path) {
  ASSIGN_OR_RETURN(const std::string text, input_file::Read(index_path, kMaxIndexBytes));
  ASSIGN_OR_RETURN(const nlohmann::json index, ParseJsonObject(text, kIndexFile));
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object() || map->empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(kIndexFile, ": expected weight_map to be an object of tensors, found ",
                     map == index.end() ? "none" : Quoted(*map)));
  }
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : map->items()) {
    // A shard lies beside its index: a path could name any file of the machine.
    if (!shard.is_string() || shard.get<std::string>().empty() ||
        shard.get<std::string>().find_first_of(std::string("/\0", 2)) != std::string::npos) {
      return absl::InvalidArgumentError(absl::StrCat(
          kIndexFile, ": tensor ", tensor, ": expected a file name, found ", Quoted(shard)));
    }
    shards.insert(shard.get<std::string>());
  }
  for (const std::string& shard : shards) {
    const std::string path = absl::StrCat(model_dir, "/", shard);
    if (!input_file::IsThere(path)) {
      return absl::NotFoundError(
          absl::StrCat(kIndexFile, ": shard ", shard, " is listed but not in ", model_dir));
    }
    RETURN_IF_ERROR(AddFile(path));
  }
  for (const auto& [tensor, shard] : map->items()) {
    const TensorView* view = Find(tensor);
    if (view == nullptr || view->file != shard.get<std::string>()) {
      return absl::InvalidArgumentError(
          absl::StrCat(kIndexFile, ": tensor ", tensor, ": expected in ", shard.get<std::string>(),
                       ", found ", view == nullptr ? "nowhere" : absl::StrCat("in ", view->file)));
    }
  }
  return absl::OkStatus();
}

}  // namespace model
