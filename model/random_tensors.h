// RandomTensors: tensors without a checkpoint, made when they are asked for.  For measuring speed.
//
// All are bf16.  Matrices hold numbers of both signs between 1/64 and 1/32, which keep a network's
// activations near 1 and its experts evenly used; vectors of norms hold ones, other vectors zeros.
// What a tensor holds depends on its name and on the largest tensor asked for before it, so two
// processes that load the same config have the same weights.
//
// Tensors share memory, so a model takes little of the host's.  Views live as long as this.
// Thread-compatible.

#ifndef MODEL_RANDOM_TENSORS_H_
#define MODEL_RANDOM_TENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/safetensors.h"

namespace model {

class RandomTensors final {
 public:
  // The same view for the same name.
  const TensorView* Get(const std::string& name, const std::vector<int64_t>& shape);

 private:
  using Numbers = std::vector<uint16_t>;
  const Numbers& AtLeast(int64_t count);

  std::map<std::string, TensorView> tensors_;
  std::map<int64_t, Numbers> pools_;                     // by size; the largest is used
  std::map<std::pair<bool, int64_t>, Numbers> vectors_;  // of ones (true) or zeros, by size
};

}  // namespace model

#endif  // MODEL_RANDOM_TENSORS_H_
