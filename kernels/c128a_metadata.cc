#include "kernels/c128a_metadata.h"

#include "kernels/sparse_decode.h"

namespace kernels {

int32_t C128AWidth(int32_t max_model_len, int32_t tokens_per_entry) {
  const int32_t entries = max_model_len / tokens_per_entry;
  return (entries + kSparseIndexMultiple - 1) / kSparseIndexMultiple * kSparseIndexMultiple;
}

}  // namespace kernels
