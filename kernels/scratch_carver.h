// ScratchCarver: lays arrays out one after the other.  From a null base it only measures: carve
// twice with the same calls, once to know the size to allocate.
//
// Thread-compatible.

#ifndef KERNELS_SCRATCH_CARVER_H_
#define KERNELS_SCRATCH_CARVER_H_

#include <cstddef>
#include <cstdint>

namespace kernels {

class ScratchCarver final {
 public:
  static constexpr int64_t kAlignment = 256;  // bytes, of every array and of the size

  // `base`: null, or aligned.
  explicit ScratchCarver(std::byte* base) : base_(base) {}

  template <typename T>
  void Take(T*& pointer, int64_t count) {
    pointer = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + size_);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  int64_t size() const { return size_; }

 private:
  std::byte* base_;
  int64_t size_ = 0;
};

}  // namespace kernels

#endif  // KERNELS_SCRATCH_CARVER_H_
