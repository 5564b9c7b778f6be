#include "kernels/cuda/device_copies.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/graph_recording.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

class PinnedRange final : public HostPin {
 public:
  // Errors: kResourceExhausted naming the size.
  static absl::StatusOr<std::unique_ptr<HostPin>> Pin(absl::Span<std::byte> host) {
    const std::lock_guard<std::mutex> lock(RecordingMutex());
    const cudaError_t error = cudaHostRegister(host.data(), host.size(), cudaHostRegisterDefault);
    if (error == cudaSuccess) return std::unique_ptr<HostPin>(new PinnedRange(host.data()));
    cudaGetLastError();  // or the next launch would report it
    return absl::ResourceExhaustedError(absl::StrCat(
        "cuda: pinning ", host.size(), " bytes of host memory: ", cudaGetErrorString(error), " (",
        cudaGetErrorName(error), ")"));
  }
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;
  ~PinnedRange() override {
    const std::lock_guard<std::mutex> lock(RecordingMutex());
    cudaHostUnregister(data_);
  }

 private:
  explicit PinnedRange(std::byte* data) : data_(data) {}

  std::byte* const data_;
};

// Mapped here and pinned, not allocated by CUDA: memory of the driver's own cannot be read by other
// processes (cross-memory attach).
class MappedBuffer final : public Buffer {
 public:
  static absl::StatusOr<std::unique_ptr<Buffer>> Map(int64_t size_bytes) {
    const auto size = static_cast<size_t>(std::max<int64_t>(size_bytes, 1));
    void* const data =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "cannot map ", size, " bytes for copies of the device: ", std::strerror(errno)));
    }
    madvise(data, size, MADV_HUGEPAGE);  // advice only
    absl::StatusOr<std::unique_ptr<HostPin>> pin =
        PinnedRange::Pin({static_cast<std::byte*>(data), size});
    if (!pin.ok()) {
      munmap(data, size);
      return pin.status();
    }
    return std::unique_ptr<Buffer>(
        new MappedBuffer(static_cast<std::byte*>(data), size, size_bytes, *std::move(pin)));
  }
  MappedBuffer(const MappedBuffer&) = delete;
  MappedBuffer& operator=(const MappedBuffer&) = delete;
  ~MappedBuffer() override {
    pin_.reset();
    munmap(data_, mapped_bytes_);
  }

  std::byte* data() override { return data_; }
  int64_t size_bytes() const override { return size_bytes_; }

 private:
  MappedBuffer(std::byte* data, size_t mapped_bytes, int64_t size_bytes,
               std::unique_ptr<HostPin> pin)
      : data_(data), mapped_bytes_(mapped_bytes), size_bytes_(size_bytes), pin_(std::move(pin)) {}

  std::byte* const data_;
  const size_t mapped_bytes_;
  const int64_t size_bytes_;
  std::unique_ptr<HostPin> pin_;
};

absl::Status SettleDevice() {
  const std::lock_guard<std::mutex> lock(RecordingMutex());
  return ToStatus(cudaDeviceSynchronize(), "settling the device");
}

// The copies of one direction, and the thread that waits for them.
class Lane {
 public:
  static absl::StatusOr<std::unique_ptr<Lane>> Create(cudaMemcpyKind kind) {
    ASSIGN_OR_RETURN(Stream stream, Stream::Create());
    return std::unique_ptr<Lane>(new Lane(kind, std::move(stream)));
  }
  ~Lane() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
    for (const cudaEvent_t event : idle_) cudaEventDestroy(event);
  }

  void Start(void* to, const void* from, size_t size, DeviceCopies::Done done) {
    const std::lock_guard<std::mutex> lock(mutex_);  // over the launch: both queues in one order
    Copy copy{.event = nullptr, .status = {}, .done = std::move(done)};
    copy.status = Launch(to, from, size, copy.event);
    copies_.push_back(std::move(copy));
    changed_.notify_all();
  }
  void Settle(DeviceCopies::Done done) {
    const std::lock_guard<std::mutex> lock(mutex_);
    copies_.push_back({.event = nullptr, .status = {}, .done = std::move(done)});
    changed_.notify_all();
  }

 private:
  struct Copy {
    cudaEvent_t event;    // behind it; null: of the whole device, if its launch was well
    absl::Status status;  // of its launch
    DeviceCopies::Done done;
  };

  Lane(cudaMemcpyKind kind, Stream stream)
      : kind_(kind), stream_(std::move(stream)), thread_([this] { Run(); }) {}

  // mutex_ is held.
  absl::Status Launch(void* to, const void* from, size_t size, cudaEvent_t& event) {
    if (idle_.empty()) {
      RETURN_IF_ERROR(
          ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event"));
    } else {
      event = idle_.back();
      idle_.pop_back();
    }
    RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(to, from, size, kind_, stream_.get()), "copying a piece"));
    return ToStatus(cudaEventRecord(event, stream_.get()), "copying a piece");
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !copies_.empty(); });
      if (copies_.empty()) return;
      Copy copy = std::move(copies_.front());
      copies_.pop_front();
      lock.unlock();
      if (copy.status.ok()) {
        copy.status = copy.event == nullptr
                          ? SettleDevice()
                          : ToStatus(cudaEventSynchronize(copy.event), "copying a piece");
      }
      copy.done(std::move(copy.status));
      lock.lock();
      if (copy.event != nullptr) idle_.push_back(copy.event);
    }
  }

  const cudaMemcpyKind kind_;
  const Stream stream_;
  std::mutex mutex_;  // guards everything below but thread_
  std::condition_variable changed_;
  std::deque<Copy> copies_;  // oldest first
  std::vector<cudaEvent_t> idle_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses everything above
};

class CudaDeviceCopies final : public DeviceCopies {
 public:
  CudaDeviceCopies(std::unique_ptr<Lane> to_host, std::unique_ptr<Lane> to_device)
      : to_host_(std::move(to_host)), to_device_(std::move(to_device)) {}

  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(int64_t size_bytes) override {
    return MappedBuffer::Map(size_bytes);
  }
  absl::StatusOr<std::unique_ptr<HostPin>> Pin(absl::Span<std::byte> host) override {
    return PinnedRange::Pin(host);
  }
  void ToHost(absl::Span<std::byte> host, const std::byte* device, Done done) override {
    to_host_->Start(host.data(), device, host.size(), std::move(done));
  }
  void ToDevice(std::byte* device, absl::Span<const std::byte> host, Done done) override {
    to_device_->Start(device, host.data(), host.size(), std::move(done));
  }
  void Settle(Done done) override { to_device_->Settle(std::move(done)); }

 private:
  const std::unique_ptr<Lane> to_host_;
  const std::unique_ptr<Lane> to_device_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceCopies>> CreateDeviceCopies() {
  ASSIGN_OR_RETURN(std::unique_ptr<Lane> to_host, Lane::Create(cudaMemcpyDeviceToHost));
  ASSIGN_OR_RETURN(std::unique_ptr<Lane> to_device, Lane::Create(cudaMemcpyHostToDevice));
  return std::make_unique<CudaDeviceCopies>(std::move(to_host), std::move(to_device));
}

absl::Status EnterThread() {
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(0), "choosing the device"));
  return ToStatus(cudaFree(nullptr), "choosing the device");  // makes its context
}

}  // namespace kernels::cuda
