#include "kernels/store_kv.h"

namespace kernels {

int32_t LatentEntryBytes(KvFormat format, int32_t kv_lora_rank, int32_t rope_dim) {
  switch (format) {
    case KvFormat::kFloat32:
      return 4 * (kv_lora_rank + rope_dim);
    case KvFormat::kBfloat16:
      return 2 * (kv_lora_rank + rope_dim);
    case KvFormat::kFp8Latent:
      return kv_lora_rank + 4 * ((kv_lora_rank + 127) / 128) + 2 * rope_dim;
  }
  return 0;
}

}  // namespace kernels
