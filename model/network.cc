#include "model/network.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "input_file/input_file.h"
#include "model/deepseek_v2.h"
#include "model/deepseek_v32.h"
#include "model/deepseek_v4.h"
#include "model/deepseek_v4_weights.h"
#include "model/json.h"
#include "model/safetensors.h"
#include "model/weights.h"
#include "status/status_macros.h"

namespace model {
namespace {

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<Network>> LoadNetwork(const std::string& model_dir,
                                                     const NetworkOptions& options,
                                                     kernels::Backend& backend) {
  ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(model_dir));
  ASSIGN_OR_RETURN(const std::string config_text,
                   input_file::Read(absl::StrCat(model_dir, "/config.json"), kMaxConfigBytes));
  std::unique_ptr<Checkpoint> checkpoint;
  if (options.random_weights) {
    checkpoint = Checkpoint::Random(config);
  } else {
    ASSIGN_OR_RETURN(checkpoint, Checkpoint::Open(model_dir));
  }
  std::string digest = WeightsDigest(config_text, *checkpoint);
  if (config.family == ModelFamily::kDeepseekV4) {
    ASSIGN_OR_RETURN(V4Weights weights,
                     LoadDeepseekV4Weights(std::move(checkpoint), config, backend));
    return DeepseekV4::Create(std::move(config), std::move(weights), std::move(digest), options,
                              backend);
  }
  ASSIGN_OR_RETURN(Weights weights, LoadWeights(std::move(checkpoint), config, backend));
  switch (config.family) {
    case ModelFamily::kDeepseekV2:
    case ModelFamily::kDeepseekV3:
      return DeepseekV2::Create(std::move(config), std::move(weights), std::move(digest), options,
                                backend);
    case ModelFamily::kDeepseekV32:
      return DeepseekV32::Create(std::move(config), std::move(weights), std::move(digest), options,
                                 backend);
    case ModelFamily::kDeepseekV4:
      break;
  }
  return absl::InternalError("a model family without a network");
}

}  // namespace model
