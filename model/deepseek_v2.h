// DeepseekV2: the network of deepseek_v2 and deepseek_v3: dense multi-head latent attention.  The
// families differ in their config only: gate, RoPE factor, q LoRA, number formats.
//
// Thread-compatible: one executor thread calls Forward.

#ifndef MODEL_DEEPSEEK_V2_H_
#define MODEL_DEEPSEEK_V2_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/mla_network.h"

namespace model {

class DeepseekV2 final : public MlaNetwork {
 public:
  // `backend` must outlive the network.
  static absl::StatusOr<std::unique_ptr<DeepseekV2>> Create(ModelConfig config, Weights weights,
                                                            std::string weights_digest,
                                                            const NetworkOptions& options,
                                                            kernels::Backend& backend);

 private:
  using MlaNetwork::MlaNetwork;
  int64_t max_latent_rows() const override { return options().limits.max_absorbed_tokens; }
  void CarveMore(ScratchCarver& carver) override;
  absl::Status Attention(const StepView& step, int32_t layer) override;
  absl::Status AttendAbsorbed(const StepView& step, const AttentionWeights& weights, int32_t layer,
                              bool rounded);

  std::byte* decode_workspace_ = nullptr;
};

}  // namespace model

#endif  // MODEL_DEEPSEEK_V2_H_
