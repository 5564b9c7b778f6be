// Checkpoint: the tensors of a Hugging Face directory, memory-mapped, one file or sharded with an
// index.
//
// Every header is checked before anything is used: length, JSON, duplicate keys, dtype, shape
// against byte range, ranges inside the file and not overlapping.  A bad file gives one sentence
// naming file, tensor, expected and found.
//
// Thread-safe after Open.  Views live as long as the Checkpoint.

#ifndef MODEL_SAFETENSORS_H_
#define MODEL_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/dtype.h"
#include "model/config.h"

namespace model {

// `data` is aligned to the element size, whatever the file's layout.  I8 and U8 tensors, which
// these families use for packed fp4 only, have dtype kFloat4E2m1 and a shape that counts bytes.
struct TensorView {
  std::string name;
  kernels::DType dtype = kernels::DType::kFloat32;
  std::string dtype_name;  // as the header spells it, e.g. "BF16"
  std::vector<int64_t> shape;
  absl::Span<const std::byte> data;
  std::string file;  // base name, for messages
};

class RandomTensors;

// Thread-compatible if it is random.
class Checkpoint final {
 public:
  // A directory with model.safetensors or model.safetensors.index.json.
  // Errors: kNotFound (no such directory or file), kInvalidArgument (a bad file).
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& model_dir);
  // A single file (golden data).
  static absl::StatusOr<std::unique_ptr<Checkpoint>> OpenFile(const std::string& path);
  // No file: whatever is asked for by name and shape is there, as checkpoints of such a model store
  // it (random_tensors.h), and nothing else.
  static std::unique_ptr<Checkpoint> Random(const ModelConfig& config);
  ~Checkpoint();

  // Null if there is no tensor of that name.
  const TensorView* Find(std::string_view name) const;
  // Errors: kNotFound naming the tensor and the directory.
  absl::StatusOr<const TensorView*> Get(std::string_view name) const;
  // The same; the shape is not looked at, but of a random checkpoint, which then has it.
  absl::StatusOr<const TensorView*> Get(const std::string& name,
                                        const std::vector<int64_t>& shape) const;
  // Find for a matrix of rows x cols numbers, however they are stored.
  const TensorView* FindMatrix(const std::string& name, int64_t rows, int64_t cols) const;
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  int64_t total_bytes() const { return total_bytes_; }

  // Lets the system take back the memory that reading has filled; views stay valid and are read
  // from the file again when touched.
  void ReleasePages() const;

 private:
  class MappedFile;
  Checkpoint();
  absl::Status AddFile(const std::string& path);
  absl::Status AddShards(const std::string& model_dir, const std::string& index_path);

  std::string origin_;
  std::vector<std::unique_ptr<MappedFile>> files_;
  std::map<std::string, TensorView, std::less<>> tensors_;
  int64_t total_bytes_ = 0;
  std::unique_ptr<RandomTensors> random_;  // null: of files
};

}  // namespace model

#endif  // MODEL_SAFETENSORS_H_
