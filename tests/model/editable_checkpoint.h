// A checkpoint in memory that tests change and write out again.

#ifndef TESTS_MODEL_EDITABLE_CHECKPOINT_H_
#define TESTS_MODEL_EDITABLE_CHECKPOINT_H_

#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "model/safetensors.h"
#include "nlohmann/json.hpp"
#include "status/check.h"

namespace model {

struct EditableCheckpoint {
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;

    // REQUIRES: F32 or BF16.
    std::vector<double> Values() const {
      const size_t width = dtype == "F32" ? 4 : 2;
      std::vector<double> values(bytes.size() / width);
      for (size_t i = 0; i < values.size(); ++i) {
        uint32_t bits = 0;
        for (size_t byte = 0; byte < width; ++byte) {
          bits |= uint32_t{static_cast<uint8_t>(bytes[i * width + byte])}
                  << (8 * (byte + 4 - width));
        }
        values[i] = std::bit_cast<float>(bits);
      }
      return values;
    }
  };
  nlohmann::json config;
  std::map<std::string, Tensor> tensors;

  static EditableCheckpoint Read(const std::string& model_dir) {
    EditableCheckpoint result;
    std::ifstream config(model_dir + "/config.json");
    result.config = nlohmann::json::parse(config);
    const auto checkpoint = Checkpoint::Open(model_dir);
    FERRY_CHECK(checkpoint.ok()) << checkpoint.status().ToString();
    for (const auto& [name, tensor] : (*checkpoint)->tensors()) {
      result.tensors[name] = {
          tensor.dtype_name, tensor.shape,
          std::string(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size())};
    }
    return result;
  }

  // Writes `model_dir`, split over `num_shards` files (1: a single file without an index).
  void Write(const std::string& model_dir, int num_shards = 1) const {
    std::filesystem::remove_all(model_dir);
    std::filesystem::create_directories(model_dir);
    std::ofstream(model_dir + "/config.json") << config.dump(1);
    nlohmann::json index;
    for (int shard = 0; shard < num_shards; ++shard) {
      const std::string file =
          num_shards == 1 ? "model.safetensors" : "model-" + std::to_string(shard) + ".safetensors";
      nlohmann::json header = nlohmann::json::object();
      std::string data;
      int i = 0;
      for (const auto& [name, tensor] : tensors) {
        if (i++ % num_shards != shard) continue;
        header[name] = {{"dtype", tensor.dtype},
                        {"shape", tensor.shape},
                        {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
        data += tensor.bytes;
        index["weight_map"][name] = file;
      }
      const std::string text = header.dump();
      const uint64_t length = text.size();
      std::ofstream out(model_dir + "/" + file, std::ios::binary);
      out.write(reinterpret_cast<const char*>(&length), sizeof(length));
      out << text << data;
    }
    if (num_shards > 1) {
      std::ofstream(model_dir + "/model.safetensors.index.json") << index.dump();
    }
  }

  // bf16 -> float32, exactly.
  static Tensor Widened(const Tensor& tensor) {
    FERRY_CHECK(tensor.dtype == "BF16") << tensor.dtype;
    Tensor wide{"F32", tensor.shape, std::string(2 * tensor.bytes.size(), '\0')};
    for (size_t i = 0; i < tensor.bytes.size() / 2; ++i) {
      std::memcpy(wide.bytes.data() + 4 * i + 2, tensor.bytes.data() + 2 * i, 2);
    }
    return wide;
  }

  // Experts one by one -> the two fused tensors of newer transformers (and their fp8 scales).
  void FuseExperts(const std::string& prefix, int num_experts) {
    for (const std::string suffix : {"weight", "weight_scale_inv"}) {
      if (tensors.count(prefix + "0.gate_proj." + suffix) == 0) continue;
      Tensor gate_up, down;
      for (int i = 0; i < num_experts; ++i) {
        const std::string expert = prefix + std::to_string(i) + ".";
        for (const char* part : {"gate_proj.", "up_proj."}) {
          const Tensor tensor = Take(expert + part + suffix);
          gate_up.dtype = tensor.dtype;
          gate_up.shape = {num_experts, 2 * tensor.shape[0], tensor.shape[1]};
          gate_up.bytes += tensor.bytes;
        }
        const Tensor tensor = Take(expert + "down_proj." + suffix);
        down.dtype = tensor.dtype;
        down.shape = {num_experts, tensor.shape[0], tensor.shape[1]};
        down.bytes += tensor.bytes;
      }
      const std::string end = suffix == "weight" ? "" : "_scale_inv";
      tensors[prefix + "gate_up_proj" + end] = gate_up;
      tensors[prefix + "down_proj" + end] = down;
    }
  }

  Tensor Take(const std::string& name) {
    const auto found = tensors.find(name);
    FERRY_CHECK(found != tensors.end()) << name;
    Tensor tensor = found->second;
    tensors.erase(found);
    return tensor;
  }
};

}  // namespace model

#endif  // TESTS_MODEL_EDITABLE_CHECKPOINT_H_
