// KernelBench: times operations of the CUDA backend one by one, as the rows of
// docs/performance.md's kernel table: graph replays over rotating inputs, the median of many.

#ifndef BENCH_KERNEL_BENCH_H_
#define BENCH_KERNEL_BENCH_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace bench {

// What a row says besides our time.  0: nothing to say.
struct Row {
  std::string name;
  double bytes = 0;    // that must be moved
  double flops = 0;    // that must be done
  double bar_us = 0;   // not to be exceeded
  double peer_us = 0;  // the best public kernel on the same GPU
};

class KernelBench final {
 public:
  // Exits with a message without a usable GPU.  `filter`: only rows whose names contain it.
  explicit KernelBench(std::string filter);
  ~KernelBench();

  kernels::Backend& backend() { return *backend_; }
  bool Wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  // Normal values times `scale` in device memory, until Free.
  float* Floats(int64_t count, float scale = 1);
  uint16_t* Bfloat16s(int64_t count);
  std::byte* Bytes(int64_t count);  // zeros
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    return reinterpret_cast<T*>(UploadBytes(
        {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)}));
  }
  void Free() { buffers_.clear(); }

  // A random matrix in host memory, until the bench ends; matrices share it.
  kernels::WeightTensor Weight(int64_t rows, int64_t cols);  // bf16
  kernels::WeightTensor Float8Weight(int64_t rows, int64_t cols,
                                     kernels::DType scale_dtype);  // 128 x 128 scales
  kernels::WeightTensor Float4Weight(int64_t rows, int64_t cols);

  using Launch = std::function<absl::Status(const kernels::LaunchContext&, int32_t rotation)>;
  // Prints a title and a heading.
  void Group(const std::string& title);
  // Times launches of rotations 0, 1 .. and again from 0 in one graph, and prints the row.
  void Time(const Row& row, int32_t rotations, const Launch& launch);
  // The rows printed so far as a list of {name, us, floor_us, bar_us, peer_us}.  Exits with a
  // message if the file cannot be written.
  void WriteJson(const std::string& path) const;

 private:
  struct TimedRow {
    Row row;
    double us = 0;
    double floor_us = 0;
  };

  std::byte* UploadBytes(absl::Span<const std::byte> bytes);

  const std::string filter_;
  std::unique_ptr<kernels::Backend> backend_;
  cudaStream_t stream_ = nullptr;
  // The next `count` of a pool of kPoolValues.
  int64_t Take(int64_t count);
  void MakeCodes();

  std::vector<uint16_t> pool_;  // random bf16
  std::vector<uint8_t>
      codes_;  // random e4m3 numbers below 2; pairs of e2m1 numbers; empty: not made
  std::vector<float> float_scales_;
  std::vector<uint8_t> exponent_scales_;
  int64_t next_ = 0;  // offset of the next matrix in the pool
  std::vector<std::unique_ptr<kernels::Buffer>> buffers_;
  std::vector<TimedRow> timed_;
};

// Each prints its rows.
void TimeDecode(KernelBench& bench);
void TimePrefill(KernelBench& bench);
void TimeSparse(KernelBench& bench);
void TimeQuantized(KernelBench& bench);

}  // namespace bench

#endif  // BENCH_KERNEL_BENCH_H_
