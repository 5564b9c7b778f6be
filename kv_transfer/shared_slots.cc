#include "kv_transfer/shared_slots.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "kv_transfer/transport.h"
#include "status/status_macros.h"

namespace kv_transfer {
namespace {

constexpr int64_t kPage = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Of another process's: what it may make this one map and pin; ours has fewer (kSharedSlots).
constexpr int64_t kMostSlots = 64;

// What the system calls the file behind a descriptor.
std::string FileAt(const std::string& descriptor) {
  std::array<char, 256> name{};
  const ssize_t length = readlink(descriptor.c_str(), name.data(), name.size());
  return length <= 0 ? "" : std::string(name.data(), static_cast<size_t>(length));
}

// Of memory called `name`.
std::string FileNamed(absl::string_view name) {
  return absl::StrCat("/memfd:", name, " (deleted)");
}

struct Address {
  int64_t pid = 0;
  int descriptor = 0;
  int64_t count = 0;
  int64_t stride = 0;
  std::string name;
};

absl::StatusOr<Address> Parse(const std::string& text) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  Address address;
  if (words.size() == 5 && absl::SimpleAtoi(words[0], &address.pid) && address.pid > 0 &&
      absl::SimpleAtoi(words[1], &address.descriptor) && address.descriptor >= 0 &&
      absl::SimpleAtoi(words[2], &address.count) && address.count > 0 &&
      address.count <= kMostSlots && absl::SimpleAtoi(words[3], &address.stride) &&
      address.stride > 0 && address.stride % kPage == 0 && address.stride <= kMaxMessageBytes) {
    address.name = words[4];
    return address;
  }
  return absl::InvalidArgumentError("no address of shared slots");
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMapping>> SharedMapping::Create(
    int descriptor, size_t bytes, kernels::DeviceCopies* copies) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(descriptor);
    return absl::ResourceExhaustedError(
        absl::StrCat("mapping ", bytes, " bytes of shared memory: ", std::strerror(error)));
  }
  std::unique_ptr<SharedMapping> mapping(
      new SharedMapping(descriptor, {static_cast<std::byte*>(data), bytes}));
  ASSIGN_OR_RETURN(mapping->pin_, copies->Pin(mapping->span_));
  return mapping;
}

SharedMapping::~SharedMapping() {
  pin_.reset();
  munmap(span_.data(), span_.size());
  close(descriptor_);
}

SharedSlots::SharedSlots(std::unique_ptr<SharedMapping> memory, std::string name, uint16_t count,
                         int64_t slot_bytes, int64_t stride)
    : memory_(std::move(memory)),
      name_(std::move(name)),
      count_(count),
      slot_bytes_(slot_bytes),
      stride_(stride) {
  for (uint16_t slot = count; slot > 0; --slot) free_.push_back(slot);
}

absl::StatusOr<std::unique_ptr<SharedSlots>> SharedSlots::Create(kernels::DeviceCopies* copies,
                                                                 uint16_t count,
                                                                 int64_t slot_bytes) {
  const int64_t stride = (slot_bytes + kPage - 1) / kPage * kPage;
  const int64_t bytes = count * stride;
  // By its name another process sees that it has opened what was meant.
  std::string name = absl::StrCat("ferry-slots-", Epoch::Random().ToHex());
  const int descriptor = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) {
    return absl::UnimplementedError(absl::StrCat("making shared memory: ", std::strerror(errno)));
  }
  // The pages themselves, not the promise of them: a write to one that is not there would end us.
  int error = posix_fallocate(descriptor, 0, bytes);
  if (error == 0 && fcntl(descriptor, F_ADD_SEALS, kSeals) != 0) error = errno;
  if (error != 0) {
    close(descriptor);
    return absl::ResourceExhaustedError(
        absl::StrCat(bytes, " bytes of shared memory: ", std::strerror(error)));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<SharedMapping> memory,
                   SharedMapping::Create(descriptor, static_cast<size_t>(bytes), copies));
  return std::unique_ptr<SharedSlots>(
      new SharedSlots(std::move(memory), std::move(name), count, slot_bytes, stride));
}

std::string SharedSlots::address() const {
  return absl::StrCat(getpid(), " ", memory_->descriptor(), " ", count_, " ", stride_, " ", name_);
}

uint16_t SharedSlots::Take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) return 0;
  const uint16_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void SharedSlots::Return(uint16_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(slot);
}

absl::StatusOr<std::shared_ptr<const PeerSlots>> PeerSlots::Open(kernels::DeviceCopies* copies,
                                                                 const std::string& address) {
  ASSIGN_OR_RETURN(const Address of, Parse(address));
  const std::string path = absl::StrCat("/proc/", of.pid, "/fd/", of.descriptor);
  // Of a process that has taken the number of a dead one it may be anything, and not all is opened
  // without harm.
  if (FileAt(path) != FileNamed(of.name)) {
    return absl::UnavailableError(absl::StrCat(path, " is not ", of.name));
  }
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor < 0) {
    return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  struct stat info {};
  const int64_t bytes = of.count * of.stride;
  if (FileAt(absl::StrCat("/proc/self/fd/", descriptor)) != FileNamed(of.name) ||
      fstat(descriptor, &info) != 0 || info.st_size != bytes ||
      fcntl(descriptor, F_GET_SEALS) != kSeals) {
    close(descriptor);
    return absl::UnavailableError(absl::StrCat(path, " is not ", of.name));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<SharedMapping> memory,
                   SharedMapping::Create(descriptor, static_cast<size_t>(bytes), copies));
  return std::shared_ptr<const PeerSlots>(
      new PeerSlots(std::move(memory), static_cast<uint16_t>(of.count), of.stride));
}

absl::Span<const std::byte> PeerSlots::Find(uint16_t slot, uint64_t length) const {
  if (slot == 0 || slot > count_ || length > static_cast<uint64_t>(stride_)) return {};
  return memory_->span().subspan(static_cast<size_t>((slot - 1) * stride_), length);
}

}  // namespace kv_transfer
