// The header of a safetensors file; the first four bytes say how much data would stand behind it.

#include <cstring>

#include "model/safetensors_header.h"
#include "status/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint32_t data_bytes = 0;
  if (size < sizeof(data_bytes)) return 0;
  std::memcpy(&data_bytes, data, sizeof(data_bytes));
  const std::string_view header(reinterpret_cast<const char*>(data) + sizeof(data_bytes),
                                size - sizeof(data_bytes));
  const auto tensors = model::ParseSafetensorsHeader(header, data_bytes, "fuzzed");
  if (!tensors.ok()) {
    FERRY_CHECK(!tensors.status().message().empty());
    return 0;
  }
  int64_t end = 0;
  for (const model::HeaderTensor& tensor : *tensors) {
    FERRY_CHECK(tensor.begin >= end && tensor.end >= tensor.begin && tensor.end <= data_bytes)
        << tensor.name << ": " << tensor.begin << " to " << tensor.end << " behind " << end;
    end = tensor.end;
    int64_t bytes = tensor.element_bytes;
    for (const int64_t extent : tensor.shape) bytes *= extent;
    FERRY_CHECK(bytes == tensor.end - tensor.begin) << tensor.name << ": " << bytes << " bytes";
  }
  return 0;
}
