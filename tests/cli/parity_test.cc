// When a run passes, without an engine.

#include "cli/parity.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/editable_checkpoint.h"

namespace cli {
namespace {

using ::testing::HasSubstr;

template <typename T>
std::string Raw(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Two rows over four tokens, three greedy steps.
const std::vector<float> kLogits = {0, 1, 2, 3, 4, 5, 6, 7};
const std::vector<float> kMargin = {1.0f, 0.001f, 0.5f};

ParityCase TwoRows() {
  return {.name = "p2",
          .ids = {1, 2},
          .num_logit_rows = 2,
          .logits = kLogits,
          .greedy = {3, 2, 1},
          .margin = kMargin};
}

Verdict JudgeOne(const CaseRun& run, std::optional<double> max_mean_delta = std::nullopt) {
  const PathReport path{.path = "whole", .cases = {CompareCase(TwoRows(), run)}};
  return Judge({&path, 1}, max_mean_delta);
}

TEST(ParityTest, AnEqualRunPasses) {
  const CaseReport report = CompareCase(TwoRows(), {.logits = kLogits, .generated = {3, 2, 1}});
  EXPECT_EQ(report.mean_delta, 0);
  EXPECT_EQ(report.max_delta, 0);
  EXPECT_EQ(report.rows_beyond, 0);
  EXPECT_EQ(report.greedy_counted, 3);
  EXPECT_EQ(report.greedy_agreed, 3);
  EXPECT_EQ(JudgeOne({.logits = kLogits, .generated = {3, 2, 1}}).passed, 1);
}

TEST(ParityTest, ALogitBeyondTheBoundFails) {
  std::vector<float> logits = kLogits;
  logits[5] += 0.0009f;
  EXPECT_EQ(JudgeOne({.logits = logits, .generated = {3, 2, 1}}).failed, 0);
  logits[5] += 0.0002f;
  const CaseReport report = CompareCase(TwoRows(), {.logits = logits, .generated = {3, 2, 1}});
  EXPECT_EQ(report.rows_beyond, 1);
  EXPECT_NEAR(report.max_delta, 0.0011, 1e-6);
  EXPECT_NEAR(report.mean_delta, 0.0011 / 8, 1e-6);
  EXPECT_EQ(JudgeOne({.logits = logits, .generated = {3, 2, 1}}).failed, 1);
}

TEST(ParityTest, AGreedyStepCountsOnlyAboveTwiceTheError) {
  std::vector<float> logits = kLogits;
  logits[0] += 0.0006f;  // step 1, margin 0.001, is a near tie now
  const CaseReport report = CompareCase(TwoRows(), {.logits = logits, .generated = {3, 0, 1}});
  EXPECT_EQ(report.greedy_counted, 2);
  EXPECT_EQ(report.greedy_agreed, 2);
  EXPECT_EQ(JudgeOne({.logits = logits, .generated = {3, 0, 1}}).passed, 1);
  EXPECT_EQ(JudgeOne({.logits = logits, .generated = {3, 0, 0}}).failed, 1);
  EXPECT_EQ(JudgeOne({.logits = kLogits, .generated = {3, 0, 1}}).failed, 1);
}

TEST(ParityTest, NoNumberNeverPasses) {
  std::vector<float> logits = kLogits;
  logits[3] = NAN;
  EXPECT_EQ(JudgeOne({.logits = logits, .generated = {3, 2, 1}}).failed, 1);
  EXPECT_EQ(JudgeOne({.logits = logits, .generated = {3, 2, 1}}, 100.0).failed, 1);
}

TEST(ParityTest, WithAMeanBoundTheMeanOfCaseMeansDecides) {
  std::vector<float> far = kLogits;
  for (float& logit : far) logit += 0.3f;
  const PathReport path{
      .path = "whole",
      .cases = {CompareCase(TwoRows(), {.logits = far, .generated = {0, 0, 0}}),
                CompareCase(TwoRows(), {.logits = kLogits, .generated = {3, 2, 1}})}};
  EXPECT_NEAR(path.MeanOfCaseMeans(), 0.15, 1e-6);
  EXPECT_EQ(Judge({&path, 1}, 0.16).passed, 2);
  EXPECT_EQ(Judge({&path, 1}, 0.14).failed, 2);
  EXPECT_EQ(Judge({&path, 1}, std::nullopt).failed, 1);
  EXPECT_THAT(FormatPath(path), HasSubstr("mean of case means 0.15\n"));
}

class ParityGoldenFileTest : public ::testing::Test {
 protected:
  ParityGoldenFileTest() {
    golden_.config = {};
    for (const int length : {70, 2}) {
      const std::string prefix = absl::StrCat("p", length, ".");
      const int64_t rows = std::min(length, 64);
      golden_.tensors[prefix + "ids"] = {"I64", {length}, Raw(std::vector<int64_t>(length, 3))};
      golden_.tensors[prefix + "logits"] = {"F32", {rows, 4}, Raw(std::vector<float>(rows * 4))};
      golden_.tensors[prefix + "greedy"] = {"I64", {3}, Raw<int64_t>({3, 2, 1})};
      golden_.tensors[prefix + "margin"] = {"F32", {3}, Raw(kMargin)};
    }
  }
  absl::StatusOr<std::vector<ParityCase>> Read() {
    golden_.Write(dir_);
    auto checkpoint = model::Checkpoint::OpenFile(dir_ + "/model.safetensors");
    FERRY_CHECK(checkpoint.ok()) << checkpoint.status().ToString();
    checkpoint_ = std::move(*checkpoint);
    return ReadParityCases(*checkpoint_, /*vocab_size=*/4);
  }
  std::string dir_ = ::testing::TempDir() + "/parity_test_" +
                     ::testing::UnitTest::GetInstance()->current_test_info()->name();
  model::EditableCheckpoint golden_;
  std::unique_ptr<model::Checkpoint> checkpoint_;
};

TEST_F(ParityGoldenFileTest, CasesComeShortestFirst) {
  const auto cases = Read();
  ASSERT_TRUE(cases.ok()) << cases.status();
  ASSERT_EQ(cases->size(), 2u);
  EXPECT_EQ((*cases)[0].name, "p2");
  EXPECT_EQ((*cases)[0].num_logit_rows, 2);
  EXPECT_EQ((*cases)[1].num_logit_rows, 64);
}

TEST_F(ParityGoldenFileTest, SaysWhatIsWrong) {
  const auto expect = [&](const char* message) {
    EXPECT_THAT(Read().status().ToString(), HasSubstr(message));
  };
  const auto good = golden_.tensors;
  golden_.tensors["p2.logits"].shape = {4, 2};
  expect("tensor p2.logits: expected F32 [2, 4], found F32 [4, 2]");
  golden_.tensors = good;
  golden_.tensors["p2.ids"].bytes = Raw<int64_t>({3, 4});
  expect("tensor p2.ids: expected token ids below 4, found 4");
  golden_.tensors = good;
  golden_.tensors["p2.ids"] = {"I64", {0}, ""};
  expect("tensor p2.ids: expected token ids, found none");
  golden_.tensors = good;
  golden_.tensors.erase("p70.margin");
  expect("tensor p70.margin is missing");
  golden_.tensors.clear();
  expect("the golden file holds no case");
}

}  // namespace
}  // namespace cli
