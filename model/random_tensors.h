// RandomTensors: tensors without a checkpoint, made when they are asked for, in the formats that
// checkpoints of the model have.  For measuring speed.
//
// Matrices hold numbers of both signs between 1/64 and 1/32, which keep a network's activations
// near 1 and its experts evenly used; vectors of norms hold ones, other vectors zeros; a table of
// experts by token (V4) different experts in a row.  What a tensor holds depends on its name and on
// the largest tensor of its format asked for before it, so two processes that load the same config
// have the same weights.
//
// Tensors share memory, so a model takes little of the host's.  Views live as long as this.
// Thread-compatible.

#ifndef MODEL_RANDOM_TENSORS_H_
#define MODEL_RANDOM_TENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/config.h"
#include "model/safetensors.h"

namespace model {

class RandomTensors final {
 public:
  explicit RandomTensors(const ModelConfig& config);

  // In bf16, or int32 for a table of experts.  The same view for the same name.
  const TensorView* Get(const std::string& name, const std::vector<int64_t>& shape);
  // A matrix of [rows, cols] numbers, as a quantised checkpoint stores it if the config names one:
  // fp8, V4's routed experts packed fp4, each with its scales beside it ("X.weight_scale_inv", V4:
  // "X.scale" of "X.weight"), gates, heads, compressors and the indexer's weights of heads bf16,
  // the mixes of V4's residual streams float32.
  const TensorView* GetMatrix(const std::string& name, int64_t rows, int64_t cols);
  // What one of them has made; null if it is not there.
  const TensorView* Find(std::string_view name) const;

 private:
  using Words = std::vector<uint64_t>;

  kernels::DType StoredAs(const std::string& name) const;
  const std::byte* RandomBytes(const std::string& name, kernels::DType dtype, int64_t size_bytes);
  // `count` times the same.
  const std::byte* Constant(kernels::DType dtype, uint32_t value, int64_t count);
  const std::byte* ExpertTable(int64_t rows, int64_t cols);
  void AddScales(const std::string& name, kernels::DType dtype, int64_t rows, int64_t cols);
  const TensorView* Add(const std::string& name, kernels::DType dtype,
                        const std::vector<int64_t>& shape, const std::byte* data);

  const bool is_v4_;
  const bool is_quantised_;
  const int64_t block_rows_, block_cols_;  // of a scale
  const int32_t num_experts_;
  std::map<std::string, TensorView, std::less<>> tensors_;
  // Random numbers of a format, by bytes; the largest are used.
  std::map<kernels::DType, std::map<int64_t, Words>> pools_;
  std::map<std::pair<uint64_t, int64_t>, Words> constants_;     // by value and format, and count
  std::map<std::pair<int64_t, int64_t>, Words> expert_tables_;  // by shape
};

}  // namespace model

#endif  // MODEL_RANDOM_TENSORS_H_
