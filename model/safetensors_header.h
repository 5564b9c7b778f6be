// The JSON header of a safetensors file: names, dtypes, shapes and byte ranges, nothing believed.
//
// Stateless function.

#ifndef MODEL_SAFETENSORS_HEADER_H_
#define MODEL_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/dtype.h"

namespace model {

struct HeaderTensor {
  std::string name;
  std::string dtype_name;
  kernels::DType dtype = kernels::DType::kFloat32;
  int32_t element_bytes = 0;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // bytes [begin, end) of the data behind the header
  int64_t end = 0;
};

// The tensors of a header in order of their ranges: known dtypes, every range as long as its shape
// says, inside [0, data_bytes) and not overlapping.  `file` is the name in messages.
// Errors: kInvalidArgument: one sentence naming file, tensor, expected and found.
absl::StatusOr<std::vector<HeaderTensor>> ParseSafetensorsHeader(std::string_view header,
                                                                 int64_t data_bytes,
                                                                 const std::string& file);

// "[2, 3]".
std::string ShapeString(const std::vector<int64_t>& shape);

}  // namespace model

#endif  // MODEL_SAFETENSORS_HEADER_H_
