#include "model/safetensors.h"

#include <cstring>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace model {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Bytes of a file: length, header, data.
std::string FileBytes(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + data;
}

class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = ::testing::TempDir() + "/" +
           ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(dir_);
    std::filesystem::create_directories(dir_);
  }
  void Write(const std::string& name, const std::string& bytes) {
    std::ofstream(dir_ + "/" + name, std::ios::binary) << bytes;
  }
  std::string dir_;
};

TEST_F(SafetensorsTest, ReadsOneFile) {
  Write("model.safetensors", FileBytes(R"({"__metadata__": {"format": "pt"},
                      "a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
                      "b": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]},
                      "empty": {"dtype": "F16", "shape": [0, 3], "data_offsets": [12, 12]},
                      "scalar": {"dtype": "F8_E8M0", "shape": [], "data_offsets": [12, 13]}})",
                                       std::string("bbbb\0\0\x80\x3f\0\0\0\x40!", 13)));
  const auto checkpoint = Checkpoint::Open(dir_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->tensors().size(), 4u);
  EXPECT_EQ((*checkpoint)->total_bytes(), 13);
  const TensorView* a = (*checkpoint)->Find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->dtype, kernels::DType::kFloat32);
  EXPECT_THAT(a->shape, ElementsAre(2));
  EXPECT_EQ(a->file, "model.safetensors");
  // Readable in place though the header's length is odd.
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a->data.data()) % alignof(float), 0u);
  const auto* values = reinterpret_cast<const float*>(a->data.data());
  EXPECT_EQ(values[0], 1.0f);
  EXPECT_EQ(values[1], 2.0f);
  EXPECT_EQ((*checkpoint)->Find("c"), nullptr);
  EXPECT_THAT((*checkpoint)->Get("c").status().ToString(),
              AllOf(HasSubstr(dir_), HasSubstr("tensor c is missing")));
}

struct BadFile {
  const char* what;
  std::string bytes;
  std::vector<const char*> message;
};

std::string OneTensor(const std::string& tensor) {
  return FileBytes("{\"t\": " + tensor + "}", std::string(16, 'x'));
}

TEST_F(SafetensorsTest, RefusesEveryHostileFileInOneSentence) {
  std::string huge = FileBytes("{}", "");
  huge[7] = '\x7f';
  const std::string good = R"({"dtype":"F32","shape":[4],"data_offsets":[0,16]})";
  const BadFile cases[] = {
      {"empty", "", {"expected a safetensors file, found 0 bytes"}},
      {"seven bytes", "1234567", {"found 7 bytes"}},
      {"huge header",
       huge,
       {"expected a header of at most 2 bytes", "found a length of 9151314442816847874"}},
      {"truncated header",
       FileBytes(good, "").substr(0, 20),
       {"expected a header of at most 12 bytes"}},
      {"no JSON", FileBytes("not json", ""), {"header is not valid JSON"}},
      {"unfinished JSON", FileBytes("{\"t\": {", ""), {"header is not valid JSON"}},
      {"trailing JSON", FileBytes("{}{}", ""), {"header is not valid JSON"}},
      {"deep JSON", FileBytes(std::string(1 << 20, '['), ""), {"header expected to be an object"}},
      {"no object", FileBytes("[]", ""), {"header expected to be an object, found an array"}},
      {"a number", FileBytes("3", ""), {"header expected to be an object, found a number"}},
      {"tensor is no object", OneTensor("7"), {"tensor t", "expected an object, found a number"}},
      {"tensor is null", OneTensor("null"), {"tensor t", "expected an object, found null"}},
      {"missing field",
       OneTensor(R"({"dtype":"F32","shape":[4]})"),
       {"tensor t", "one is missing"}},
      {"unknown field",
       OneTensor(R"({"dtype":"F32","shape":[4],"x":[0,16]})"),
       {"tensor t", "unknown key \"x\""}},
      {"duplicate tensor",
       FileBytes("{\"t\": " + good + ", \"t\": " + good + "}", std::string(16, 'x')),
       {"tensor t", "duplicate"}},
      {"duplicate field",
       OneTensor(R"({"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]})"),
       {"tensor t", "\"dtype\" is duplicate"}},
      {"unknown dtype",
       OneTensor(R"({"dtype":"F12","shape":[4],"data_offsets":[0,16]})"),
       {"tensor t", "expected dtype F32, BF16", "found \"F12\""}},
      {"dtype is a number",
       OneTensor(R"({"dtype":4,"shape":[4],"data_offsets":[0,16]})"),
       {"tensor t", "dtype expected a string, found a number"}},
      {"negative dimension",
       OneTensor(R"({"dtype":"F32","shape":[-4],"data_offsets":[0,16]})"),
       {"tensor t", "shape holds -4"}},
      {"fractional dimension",
       OneTensor(R"({"dtype":"F32","shape":[4.5],"data_offsets":[0,16]})"),
       {"tensor t", "found the number 4.5"}},
      {"string dimension",
       OneTensor(R"({"dtype":"F32","shape":["4"],"data_offsets":[0,16]})"),
       {"tensor t", "shape expected integers from 0 on, found a string"}},
      {"nested shape",
       OneTensor(R"({"dtype":"F32","shape":[[4]],"data_offsets":[0,16]})"),
       {"tensor t", "found an array"}},
      {"too many dimensions",
       OneTensor(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,4],"data_offsets":[0,16]})"),
       {"tensor t", "more than 8 numbers"}},
      {"overflow",
       OneTensor(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]})"),
       {"tensor t", "shape [4294967296, 4294967296] of F32 overflows"}},
      {"beyond int64",
       OneTensor(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,16]})"),
       {"tensor t", "beyond the largest size"}},
      {"shape against range",
       OneTensor(R"({"dtype":"F32","shape":[3],"data_offsets":[0,16]})"),
       {"tensor t", "expected 12 bytes for shape [3] of F32, found 16"}},
      {"dtype against range",
       OneTensor(R"({"dtype":"BF16","shape":[4],"data_offsets":[0,16]})"),
       {"tensor t", "expected 8 bytes for shape [4] of BF16, found 16"}},
      {"out of range",
       OneTensor(R"({"dtype":"F32","shape":[4],"data_offsets":[4,20]})"),
       {"tensor t", "within the file's 16 bytes of data, found data_offsets [4, 20]"}},
      {"reversed range",
       OneTensor(R"({"dtype":"F32","shape":[4],"data_offsets":[16,0]})"),
       {"tensor t", "found data_offsets [16, 0]"}},
      {"negative offset",
       OneTensor(R"({"dtype":"F32","shape":[4],"data_offsets":[-4,12]})"),
       {"tensor t", "data_offsets holds -4"}},
      {"three offsets",
       OneTensor(R"({"dtype":"F32","shape":[4],"data_offsets":[0,8,16]})"),
       {"tensor t", "data_offsets expected 2 numbers, found 3"}},
      {"overlap",
       FileBytes(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                     "u":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                 std::string(16, 'x')),
       {"tensor u", "found data_offsets [4, 12] overlapping t [0, 8]"}},
      {"metadata number",
       FileBytes(R"({"__metadata__": {"a": 1}})", ""),
       {"expected a string, found a number"}},
  };
  for (const BadFile& bad : cases) {
    SCOPED_TRACE(bad.what);
    Write("model.safetensors", bad.bytes);
    const absl::Status status = Checkpoint::Open(dir_).status();
    ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    const std::string message(status.message());
    EXPECT_THAT(message, HasSubstr("model.safetensors: "));
    for (const char* part : bad.message) EXPECT_THAT(message, HasSubstr(part));
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_LT(message.size(), 400u) << message;
  }
}

// Whatever a header's bytes, Open answers with a status: every prefix and every single-byte change
// of a good file, read under the sanitizers too.
TEST_F(SafetensorsTest, SurvivesEveryTruncationAndByteChange) {
  const std::string good = FileBytes(
      R"({"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}})",
      "0123456789a");
  int refused = 0;
  for (size_t length = 0; length < good.size(); ++length) {
    Write("t.safetensors", good.substr(0, length));
    refused += !Checkpoint::OpenFile(dir_ + "/t.safetensors").ok();
  }
  EXPECT_EQ(refused, static_cast<int>(good.size()));
  for (size_t i = 0; i < good.size() - 11; ++i) {
    for (const char byte : {'\0', '{', '9', '"', '\xff'}) {
      std::string bytes = good;
      bytes[i] = byte;
      Write("t.safetensors", bytes);
      const auto checkpoint = Checkpoint::OpenFile(dir_ + "/t.safetensors");
      if (!checkpoint.ok()) continue;
      for (const auto& [name, tensor] : (*checkpoint)->tensors()) {
        std::string copy(tensor.data.size(), ' ');  // touches every byte that is promised
        std::memcpy(copy.data(), tensor.data.data(), copy.size());
      }
    }
  }
}

std::string Shard(const std::string& tensor) {
  return FileBytes("{\"" + tensor + R"(": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})",
                   tensor + "....");
}

TEST_F(SafetensorsTest, ReadsShardsThroughTheIndex) {
  Write("model-1.safetensors", Shard("a"));
  Write("model-2.safetensors", Shard("b"));
  Write(
      "model.safetensors.index.json",
      R"({"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})");
  const auto checkpoint = Checkpoint::Open(dir_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->Find("b")->file, "model-2.safetensors");
  EXPECT_EQ((*checkpoint)->total_bytes(), 8);
}

TEST_F(SafetensorsTest, RefusesABadIndex) {
  Write("model-1.safetensors", Shard("a"));
  Write("model-2.safetensors", Shard("a"));
  Write("model-3.safetensors", Shard("c"));
  const std::pair<const char*, const char*> cases[] = {
      {"{", "not valid JSON"},
      {"{}", "expected weight_map to be an object of tensors, found none"},
      {R"({"weight_map": 3})", "expected weight_map to be an object of tensors, found 3"},
      {R"({"weight_map": {"a": 3}})", "tensor a: expected a file name, found 3"},
      {R"({"weight_map": {"a": "../model-1.safetensors"}})",
       "tensor a: expected a file name, found \"../"},
      {R"({"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}})",
       "key \"a\" is duplicate"},
      {R"({"weight_map": {"a": "model-9.safetensors"}})",
       "shard model-9.safetensors is listed but not in"},
      {R"({"weight_map": {"b": "model-1.safetensors"}})",
       "tensor b: expected in model-1.safetensors, found nowhere"},
      {R"({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})",
       "model-2.safetensors: tensor a: expected in one file, found in model-1.safetensors too"},
      {R"({"weight_map": {"a": "model-3.safetensors", "c": "model-1.safetensors"}})",
       "tensor a: expected in model-3.safetensors, found in model-1.safetensors"},
  };
  for (const auto& [index, message] : cases) {
    Write("model.safetensors.index.json", index);
    const absl::Status status = Checkpoint::Open(dir_).status();
    EXPECT_FALSE(status.ok()) << index;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

TEST_F(SafetensorsTest, SaysWhatIsMissing) {
  EXPECT_THAT(Checkpoint::Open(dir_).status().ToString(),
              HasSubstr("holds neither model.safetensors nor model.safetensors.index.json"));
  EXPECT_THAT(Checkpoint::Open(dir_ + "/nowhere").status().ToString(),
              HasSubstr("no such directory"));
  EXPECT_EQ(Checkpoint::OpenFile(dir_ + "/nowhere").status().code(), absl::StatusCode::kNotFound);
  std::filesystem::create_directories(dir_ + "/model.safetensors");
  EXPECT_THAT(Checkpoint::Open(dir_).status().ToString(), HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace model
