#include "kernels/store_kv.h"

namespace kernels {
namespace {

int32_t CeilDiv(int32_t value, int32_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace

int32_t KvEntryBytes(KvFormat format, int32_t dim, int32_t rope_dim) {
  switch (format) {
    case KvFormat::kFloat32:
      return 4 * (dim + rope_dim);
    case KvFormat::kBfloat16:
      return 2 * (dim + rope_dim);
    case KvFormat::kFp8Latent:
    case KvFormat::kFp8IndexKey:
      return dim + 4 * CeilDiv(dim, 128) + 2 * rope_dim;
    case KvFormat::kFp8SharedKv:
      return dim + 2 * rope_dim + CeilDiv(CeilDiv(dim, 64), 8) * 8;
  }
  return 0;
}

int32_t KvBlockMultiple(KvFormat format, int32_t dim, int32_t rope_dim) {
  return format == KvFormat::kFp8SharedKv ? dim + 2 * rope_dim : 1;
}

}  // namespace kernels
