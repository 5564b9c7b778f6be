// ThreadScratch: working memory of one task, kept by the thread that runs it.  It grows to the
// largest size asked for and stays, so that launches of a size seen before allocate nothing.
//
// Thread-compatible: declare it thread_local.

#ifndef KERNELS_CPU_THREAD_SCRATCH_H_
#define KERNELS_CPU_THREAD_SCRATCH_H_

#include <cstddef>
#include <memory>

namespace kernels::cpu {

template <typename T>
class ThreadScratch final {
 public:
  // Undefined content, valid until the next call.
  T* Get(size_t count) {
    if (count > count_) {
      values_.reset(new T[count]);
      count_ = count;
    }
    return values_.get();
  }

 private:
  std::unique_ptr<T[]> values_;
  size_t count_ = 0;
};

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_THREAD_SCRATCH_H_
