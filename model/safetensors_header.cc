#include "model/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"

namespace model {
namespace {

using kernels::DType;
using nlohmann::json;

constexpr size_t kMaxDimensions = 8;

struct KnownDType {
  const char* name;
  DType dtype;
  int32_t bytes;
};
constexpr std::array<KnownDType, 9> kKnownDTypes = {{{"F32", DType::kFloat32, 4},
                                                     {"BF16", DType::kBfloat16, 2},
                                                     {"F16", DType::kFloat16, 2},
                                                     {"F8_E4M3", DType::kFloat8E4m3, 1},
                                                     {"F8_E8M0", DType::kFloat8E8m0, 1},
                                                     {"I8", DType::kFloat4E2m1, 1},
                                                     {"U8", DType::kFloat4E2m1, 1},
                                                     {"I32", DType::kInt32, 4},
                                                     {"I64", DType::kInt64, 8}}};

// Reads the one form a header may have, event by event, and stops at the first thing that differs:
// { name: {"dtype": string, "shape": [n...], "data_offsets": [begin, end]}..., "__metadata__":
// {...} }
class HeaderHandler final : public nlohmann::json_sax<json> {
 public:
  HeaderHandler(const std::string& file, std::vector<HeaderTensor>& tensors)
      : file_(file), tensors_(tensors) {}

  const std::string& problem() const { return problem_; }

  bool start_object(size_t) override {
    switch (where_) {
      case Where::kOutside:
        where_ = Where::kTop;
        return true;
      case Where::kTop:
        where_ = name_ == "__metadata__" ? Where::kMetadata : Where::kTensor;
        if (where_ == Where::kTensor) {
          tensors_.emplace_back();
          tensors_.back().name = name_;
          fields_ = 0;
        }
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool key(string_t& key) override {
    if (where_ == Where::kTop) {
      name_ = key;
      field_.clear();
      return names_.insert(key).second ||
             Fail(absl::StrCat("tensor ", Name(), ": key is duplicate"));
    }
    field_ = key;
    if (where_ == Where::kMetadata) return true;
    const int bit = key == "dtype" ? 1 : key == "shape" ? 2 : key == "data_offsets" ? 4 : 0;
    if (bit == 0)
      return Fail(absl::StrCat("tensor ", Name(), ": unknown key \"", Shortened(key), "\""));
    if ((fields_ & bit) != 0) {
      return Fail(absl::StrCat("tensor ", Name(), ": key \"", key, "\" is duplicate"));
    }
    fields_ |= bit;
    return true;
  }

  bool end_object() override {
    if (where_ == Where::kTop) {
      where_ = Where::kOutside;
      return true;
    }
    if (where_ == Where::kTensor && fields_ != 7) {
      return Fail(absl::StrCat("tensor ", Name(),
                               ": expected dtype, shape and data_offsets, one is "
                               "missing"));
    }
    where_ = Where::kTop;
    return true;
  }

  bool start_array(size_t) override {
    if (where_ != Where::kTensor || field_ == "dtype") return Unexpected("an array");
    numbers_.clear();
    where_ = Where::kNumbers;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ != Where::kNumbers) return Unexpected("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Fail(absl::StrCat("tensor ", Name(), ": ", field_, " holds ", value,
                               ", beyond the largest size"));
    }
    if (numbers_.size() == kMaxDimensions) {
      return Fail(absl::StrCat("tensor ", Name(), ": ", field_, " has more than ", kMaxDimensions,
                               " numbers"));
    }
    numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool end_array() override {
    where_ = Where::kTensor;
    HeaderTensor& tensor = tensors_.back();
    if (field_ == "shape") {
      tensor.shape = numbers_;
      return true;
    }
    if (numbers_.size() != 2) {
      return Fail(absl::StrCat("tensor ", Name(), ": data_offsets expected 2 numbers, found ",
                               numbers_.size()));
    }
    tensor.begin = numbers_[0];
    tensor.end = numbers_[1];
    return true;
  }

  bool string(string_t& value) override {
    if (where_ == Where::kMetadata) return true;
    if (where_ != Where::kTensor || field_ != "dtype") return Unexpected("a string");
    tensors_.back().dtype_name = value;
    return true;
  }

  bool number_integer(number_integer_t value) override {
    if (where_ != Where::kNumbers) return Unexpected("a number");
    return Fail(absl::StrCat("tensor ", Name(), ": ", field_, " holds ", value,
                             ", expected no negative number"));
  }
  bool number_float(number_float_t, const string_t& text) override {
    return Unexpected(absl::StrCat("the number ", Shortened(text)));
  }
  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool binary(binary_t&) override { return Unexpected("binary data"); }
  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    return Fail(absl::StrCat("header is not valid JSON at byte ", position));
  }

 private:
  enum class Where { kOutside, kTop, kMetadata, kTensor, kNumbers };

  static std::string Shortened(const std::string& text) {
    return text.size() <= 120 ? text : text.substr(0, 120) + "...";
  }
  std::string Name() const { return Shortened(name_); }

  bool Unexpected(const std::string& found) {
    if (where_ == Where::kOutside || (where_ == Where::kTop && name_.empty())) {
      return Fail(absl::StrCat("header expected to be an object, found ", found));
    }
    const char* expected = where_ == Where::kNumbers                         ? "integers from 0 on"
                           : where_ == Where::kTop                           ? "an object"
                           : field_ == "dtype" || where_ == Where::kMetadata ? "a string"
                                                                             : "an array";
    return Fail(absl::StrCat("tensor ", Name(), ": ", Shortened(field_), field_.empty() ? "" : " ",
                             "expected ", expected, ", found ", found));
  }
  bool Fail(const std::string& problem) {
    if (problem_.empty()) problem_ = absl::StrCat(file_, ": ", problem);
    return false;
  }

  const std::string& file_;
  std::vector<HeaderTensor>& tensors_;
  Where where_ = Where::kOutside;
  std::set<std::string> names_;
  std::string name_;  // of the tensor being read
  std::string field_;
  int fields_ = 0;  // a bit for each field seen
  std::vector<int64_t> numbers_;
  std::string problem_;
};

absl::Status CheckTensor(HeaderTensor& tensor, int64_t data_bytes, const std::string& file) {
  const auto fail = [&](const std::string& problem) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": tensor ", tensor.name, ": ", problem));
  };
  const auto* known =
      std::find_if(kKnownDTypes.begin(), kKnownDTypes.end(),
                   [&](const auto& entry) { return tensor.dtype_name == entry.name; });
  if (known == kKnownDTypes.end()) {
    return fail(absl::StrCat(
        "expected dtype ",
        absl::StrJoin(kKnownDTypes, ", ",
                      [](std::string* out, const auto& entry) { out->append(entry.name); }),
        ", found \"", tensor.dtype_name.substr(0, 40), "\""));
  }
  tensor.dtype = known->dtype;
  tensor.element_bytes = known->bytes;
  int64_t bytes = known->bytes;
  bool overflow = false;
  for (const int64_t dimension : tensor.shape) {
    overflow |= __builtin_mul_overflow(bytes, dimension, &bytes);
  }
  const std::string what =
      absl::StrCat("shape ", ShapeString(tensor.shape), " of ", tensor.dtype_name);
  const std::string range = absl::StrCat("data_offsets [", tensor.begin, ", ", tensor.end, "]");
  if (overflow) return fail(absl::StrCat(what, " overflows"));
  if (tensor.begin > tensor.end || tensor.end > data_bytes) {
    return fail(absl::StrCat("expected a range within the file's ", data_bytes,
                             " bytes of data, found ", range));
  }
  if (tensor.end - tensor.begin != bytes) {
    return fail(absl::StrCat("expected ", bytes, " bytes for ", what, ", found ",
                             tensor.end - tensor.begin, " in ", range));
  }
  return absl::OkStatus();
}

}  // namespace

std::string ShapeString(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<std::vector<HeaderTensor>> ParseSafetensorsHeader(std::string_view header,
                                                                 int64_t data_bytes,
                                                                 const std::string& file) {
  std::vector<HeaderTensor> tensors;
  HeaderHandler handler(file, tensors);
  if (!json::sax_parse(header.begin(), header.end(), &handler)) {
    return absl::InvalidArgumentError(handler.problem());
  }
  for (HeaderTensor& tensor : tensors) RETURN_IF_ERROR(CheckTensor(tensor, data_bytes, file));
  std::sort(tensors.begin(), tensors.end(), [](const HeaderTensor& a, const HeaderTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  for (size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].begin < tensors[i - 1].end) {
      return absl::InvalidArgumentError(absl::StrCat(
          file, ": tensor ", tensors[i].name, ": expected a range of its own, found data_offsets [",
          tensors[i].begin, ", ", tensors[i].end, "] overlapping ", tensors[i - 1].name, " [",
          tensors[i - 1].begin, ", ", tensors[i - 1].end, "]"));
    }
  }
  return tensors;
}

}  // namespace model
