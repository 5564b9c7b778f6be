// What tests of the CUDA backend share: the backend under test and the CPU backend beside it, and
// arrays on the device.  Label gpu: skipped where there is none.

#ifndef TESTS_KERNELS_CUDA_DEVICE_TEST_H_
#define TESTS_KERNELS_CUDA_DEVICE_TEST_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"

namespace kernels {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// What `exact` results are in bf16, or kUntouched where nothing was written: where they are NaN.
inline constexpr uint16_t kUntouched = 0xffff;
inline std::vector<uint16_t> RoundWritten(const std::vector<float>& exact) {
  std::vector<uint16_t> rounded(exact.size(), kUntouched);
  for (size_t i = 0; i < exact.size(); ++i) {
    if (std::isnan(exact[i])) continue;
    uint32_t bits;
    std::memcpy(&bits, &exact[i], sizeof(bits));
    rounded[i] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  return rounded;
}

class DeviceTest : public ::testing::Test {
 protected:
  explicit DeviceTest(bool bfloat16 = false) : options_{.bfloat16 = bfloat16} {}

  void SetUp() override {
    absl::StatusOr<std::unique_ptr<Backend>> backend = cuda::CreateCudaBackend(options_);
    if (absl::IsFailedPrecondition(backend.status())) GTEST_SKIP() << backend.status();
    ASSERT_TRUE(backend.ok()) << backend.status();
    device_ = std::move(*backend);
    host_ = cpu::CreateCpuBackend(2);
  }
  // What was launched has run, without a fault unless the test has taken it.
  void TearDown() override {
    if (device_ == nullptr) return;
    if (fault_expected_) return;
    const absl::Status status = device_->Synchronize({});
    EXPECT_TRUE(status.ok()) << status;
  }

  // A copy in device memory that lives until the test ends.
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    return reinterpret_cast<T*>(UploadBytes(
        {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)}));
  }
  std::byte* UploadBytes(absl::Span<const std::byte> bytes) {
    buffers_.push_back(*device_->Allocate(static_cast<int64_t>(bytes.size())));
    EXPECT_TRUE(device_->CopyToDevice({}, buffers_.back()->data(), bytes).ok());
    return buffers_.back()->data();
  }
  // Workspaces are full of NaN: nobody may read what nobody wrote.
  std::byte* Workspace(int64_t size_bytes) {
    return UploadBytes(std::vector<std::byte>(static_cast<size_t>(size_bytes), std::byte{0xff}));
  }

  template <typename T>
  std::vector<T> Download(const T* device, size_t count) {
    std::vector<T> values(count);
    const absl::Status copied =
        device_->CopyToHost({}, {reinterpret_cast<std::byte*>(values.data()), count * sizeof(T)},
                            reinterpret_cast<const std::byte*>(device));
    EXPECT_TRUE(copied.ok()) << copied;
    if (!fault_expected_) {
      const absl::Status status = device_->Synchronize({});
      EXPECT_TRUE(status.ok()) << status;
    }
    return values;
  }

  // Runs what was launched; its message.  The backend is not used afterwards.
  std::string TakeFault() {
    fault_expected_ = true;
    const absl::Status status = device_->Synchronize({});
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    return std::string(status.message());
  }

  std::unique_ptr<Backend> device_;
  std::unique_ptr<Backend> host_;

 private:
  const cuda::CudaOptions options_;
  std::vector<std::unique_ptr<Buffer>> buffers_;  // freed before the backend
  bool fault_expected_ = false;
};

}  // namespace kernels

#endif  // TESTS_KERNELS_CUDA_DEVICE_TEST_H_
