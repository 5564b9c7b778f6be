// Checkpoints as published, names, shapes and dtypes without the data.

#ifndef TESTS_MODEL_PUBLISHED_TENSORS_H_
#define TESTS_MODEL_PUBLISHED_TENSORS_H_

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"

namespace model {

struct PublishedTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
};

// Files of the right sizes with holes for data, one for each layer; only V4's expert tables (the
// I64 tensors) are there.
inline void WriteWithoutData(const std::vector<PublishedTensor>& tensors, const std::string& dir) {
  std::filesystem::remove_all(dir);
  std::filesystem::create_directories(dir);
  const std::map<std::string, int64_t> bytes = {{"BF16", 2},    {"F32", 4}, {"F8_E4M3", 1},
                                                {"F8_E8M0", 1}, {"I8", 1},  {"I64", 8}};
  struct Shard {
    nlohmann::json header = nlohmann::json::object();
    int64_t size = 0;
    std::vector<std::pair<int64_t, int64_t>> tables;  // offset, values
  };
  std::map<std::string, Shard> shards;
  nlohmann::json index;
  for (const PublishedTensor& tensor : tensors) {
    const size_t layers = tensor.name.find("layers.");
    const std::string file =
        layers == std::string::npos
            ? "other.safetensors"
            : tensor.name.substr(0, tensor.name.find('.', layers + 7)) + ".safetensors";
    Shard& shard = shards[file];
    int64_t count = 1;
    for (const int64_t size : tensor.shape) count *= size;
    const int64_t end = shard.size + count * bytes.at(tensor.dtype);
    if (tensor.dtype == "I64") shard.tables.push_back({shard.size, count});
    shard.header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {shard.size, end}}};
    shard.size = end;
    index["weight_map"][tensor.name] = file;
  }
  for (const auto& [file, shard] : shards) {
    std::string text = shard.header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t length = text.size();
    const std::string path = dir + "/" + file;
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), sizeof(length));
    out << text;
    for (const auto& [offset, count] : shard.tables) {
      std::vector<int64_t> table(static_cast<size_t>(count));
      for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int64_t>(i % 256);
      out.seekp(static_cast<int64_t>(8 + length) + offset);
      out.write(reinterpret_cast<const char*>(table.data()),
                static_cast<int64_t>(table.size() * sizeof(int64_t)));
    }
    out.close();
    std::filesystem::resize_file(path, 8 + length + static_cast<uint64_t>(shard.size));
  }
  std::ofstream(dir + "/model.safetensors.index.json") << index.dump();
}

}  // namespace model

#endif  // TESTS_MODEL_PUBLISHED_TENSORS_H_
