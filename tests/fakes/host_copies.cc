#include "tests/fakes/host_copies.h"

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace fakes {
namespace {

class HostBuffer final : public kernels::Buffer {
 public:
  explicit HostBuffer(int64_t size_bytes)
      : memory_(static_cast<std::byte*>(std::calloc(size_bytes, 1))), size_bytes_(size_bytes) {}
  ~HostBuffer() override { std::free(memory_); }
  std::byte* data() override { return memory_; }
  int64_t size_bytes() const override { return size_bytes_; }

 private:
  std::byte* const memory_;
  const int64_t size_bytes_;
};

class HostCopiesImpl final : public HostCopies {
 public:
  HostCopiesImpl() {
    for (Lane& lane : lanes_) lane.thread = std::thread([this, &lane] { Run(lane); });
  }
  ~HostCopiesImpl() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      held_ = false;
    }
    changed_.notify_all();
    for (Lane& lane : lanes_) lane.thread.join();
  }

  absl::StatusOr<std::unique_ptr<kernels::Buffer>> AllocateHost(int64_t size_bytes) override {
    return MakeHostBuffer(size_bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::HostPin>> Pin(absl::Span<std::byte>) override {
    return std::make_unique<kernels::HostPin>();
  }
  void ToHost(absl::Span<std::byte> host, const std::byte* device, Done done) override {
    Start(lanes_[0], {host.data(), device, host.size(), std::move(done)});
  }
  void ToDevice(std::byte* device, absl::Span<const std::byte> host, Done done) override {
    Start(lanes_[1], {device, host.data(), host.size(), std::move(done)});
  }

  void Settle(Done done) override { Start(lanes_[1], {nullptr, nullptr, 0, std::move(done)}); }

  void Hold() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = true;
  }
  void Release() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  bool WaitForHeld(int count, absl::Duration timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout), [&] {
      return held_ &&
             lanes_[0].copies.size() + lanes_[1].copies.size() >= static_cast<size_t>(count);
    });
  }
  void Fail(absl::Status status) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = std::move(status);
  }

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    size_t size;
    Done done;
  };
  struct Lane {
    std::deque<Copy> copies;
    std::thread thread;
  };

  void Start(Lane& lane, Copy copy) {
    const std::lock_guard<std::mutex> lock(mutex_);
    lane.copies.push_back(std::move(copy));
    changed_.notify_all();
  }

  void Run(Lane& lane) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !held_ && (stopping_ || !lane.copies.empty()); });
      if (lane.copies.empty()) return;
      const Copy copy = std::move(lane.copies.front());
      lane.copies.pop_front();
      const absl::Status failure(failure_.code(), failure_.message());
      lock.unlock();
      if (failure.ok() && copy.size > 0) std::memcpy(copy.to, copy.from, copy.size);
      copy.done(failure);
      lock.lock();
    }
  }

  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  Lane lanes_[2];  // to the host, to the device
  absl::Status failure_;
  bool held_ = false;
  bool stopping_ = false;
};

}  // namespace

std::unique_ptr<HostCopies> CreateHostCopies() { return std::make_unique<HostCopiesImpl>(); }

std::unique_ptr<kernels::Buffer> MakeHostBuffer(int64_t size_bytes) {
  return std::make_unique<HostBuffer>(size_bytes);
}

}  // namespace fakes
