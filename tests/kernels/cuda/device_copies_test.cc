#include "kernels/cuda/device_copies.h"

#include <algorithm>
#include <future>
#include <vector>

#include "tests/kernels/cuda/device_test.h"

namespace kernels {
namespace {

class DeviceCopiesTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto copies = cuda::CreateDeviceCopies();
    ASSERT_TRUE(copies.ok()) << copies.status();
    copies_ = *std::move(copies);
  }

  absl::Span<std::byte> HostBytes(int64_t size) {
    host_memory_.push_back(*copies_->AllocateHost(size));
    return {host_memory_.back()->data(), static_cast<size_t>(size)};
  }

  std::vector<std::unique_ptr<Buffer>> host_memory_;
  std::unique_ptr<DeviceCopies> copies_;  // ends before its memory does
};

// What `Start` starts, as a future of its end.
class Ended {
 public:
  DeviceCopies::Done done() {
    return [this](absl::Status status) { status_.set_value(std::move(status)); };
  }
  absl::Status Wait() { return status_.get_future().get(); }

 private:
  std::promise<absl::Status> status_;
};

TEST_F(DeviceCopiesTest, BytesGoBothWays) {
  const std::vector<std::byte> bytes(3 << 20, std::byte{7});
  std::byte* const device = Upload(bytes);
  ASSERT_TRUE(device_->Synchronize({}).ok());
  const absl::Span<std::byte> host = HostBytes(3 << 20);
  Ended read;
  copies_->ToHost(host, device, read.done());
  ASSERT_TRUE(read.Wait().ok());
  EXPECT_TRUE(std::equal(host.begin(), host.end(), bytes.begin()));
  std::fill(host.begin(), host.end(), std::byte{9});
  Ended written;
  copies_->ToDevice(device, host, written.done());
  ASSERT_TRUE(written.Wait().ok());
  EXPECT_THAT(Download(device, 3 << 20), testing::Each(std::byte{9}));
}

TEST_F(DeviceCopiesTest, TheyEndInTheOrderOfTheCalls) {
  constexpr int kCopies = 50;
  constexpr int64_t kBytes = 64 << 10;
  std::byte* const device = Workspace(kCopies * kBytes);
  const absl::Span<std::byte> host = HostBytes(kCopies * kBytes);
  std::vector<int> order;
  Ended last;
  for (int i = 0; i < kCopies; ++i) {
    copies_->ToDevice(device + i * kBytes, host.subspan(i * kBytes, kBytes),
                      [&order, &last, i, done = last.done()](absl::Status status) {
                        order.push_back(i);
                        if (i == kCopies - 1) done(std::move(status));
                      });
  }
  ASSERT_TRUE(last.Wait().ok());
  EXPECT_EQ(order.size(), static_cast<size_t>(kCopies));
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

// A wait for the whole device is none of what may happen while a step is recorded.
TEST_F(DeviceCopiesTest, SettlingBreaksNoRecording) {
  std::byte* const device = Workspace(1 << 20);
  const absl::Span<std::byte> host = HostBytes(1 << 20);
  for (int round = 0; round < 20; ++round) {
    Ended settled;
    const auto recording = device_->Record([&]() -> absl::Status {
      copies_->Settle(settled.done());
      for (int i = 0; i < 200; ++i) {
        const absl::Status status = device_->CopyToDevice({}, device, host);
        if (!status.ok()) return status;
      }
      return absl::OkStatus();
    });
    ASSERT_TRUE(recording.ok()) << recording.status();
    ASSERT_TRUE(settled.Wait().ok());
    ASSERT_TRUE((*recording)->Replay({}).ok());
  }
}

TEST_F(DeviceCopiesTest, MemoryThatIsNotThereIsNamed) {
  const auto memory = copies_->AllocateHost(int64_t{1} << 60);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(memory.status().message()), testing::HasSubstr("1152921504606846976"));
}

}  // namespace
}  // namespace kernels
