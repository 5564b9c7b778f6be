#include "cli/generation_printer.h"

#include <sstream>

#include "ferry/v1/inference.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace cli {
namespace {

ferry::v1::GenerateResponse Message(uint32_t branch, const std::string& text, uint32_t id) {
  ferry::v1::GenerateResponse response;
  response.set_index(branch);
  response.set_text(text);
  response.add_token_ids(id);
  return response;
}

TEST(GenerationPrinterTest, OneBranchIsPrintedAsItArrives) {
  std::ostringstream out;
  GenerationPrinter printer({.num_branches = 1, .print_ids = true, .print_logprobs = true}, out);
  ferry::v1::GenerateResponse first = Message(0, "Hel", 5);
  auto* position = first.add_logprobs();
  position->mutable_chosen()->set_token("Hel");
  position->mutable_chosen()->set_logprob(-0.5f);
  auto* top = position->add_top();
  top->set_token("\n");
  top->set_logprob(-1.25f);
  printer.Add(first);
  EXPECT_EQ(out.str(), "Hel");
  printer.Add(Message(0, "lo", 7));
  printer.Finish();
  EXPECT_EQ(out.str(), "Hello\nids: 5 7\nlogprob: \"Hel\" -0.5000\t\"\\n\" -1.2500\n");
}

TEST(GenerationPrinterTest, BranchesArePrintedWhole) {
  std::ostringstream out;
  GenerationPrinter printer({.num_branches = 2, .print_ids = true, .print_logprobs = false}, out);
  printer.Add(Message(1, "x", 1));
  printer.Add(Message(0, "a", 2));
  printer.Add(Message(1, "y", 3));
  EXPECT_EQ(out.str(), "");
  printer.Finish();
  EXPECT_EQ(out.str(), "text[0]: a\nids[0]: 2\ntext[1]: xy\nids[1]: 1 3\n");
}

TEST(GenerationPrinterTest, NothingIsPrintedOfACallThatFailed) {
  std::ostringstream out;
  GenerationPrinter printer({.num_branches = 1, .print_ids = true, .print_logprobs = true}, out);
  printer.Finish();
  EXPECT_EQ(out.str(), "");
}

TEST(GenerationPrinterTest, SummarySaysWhereTheCacheWent) {
  ferry::v1::GenerateSummary summary;
  summary.set_prompt_tokens(100);
  summary.set_cached_tokens(64);
  summary.set_completion_tokens(11);
  summary.set_prefill_worker("127.0.0.1:1");
  summary.set_decode_worker("127.0.0.1:2");
  summary.set_kv_bytes(4096);
  summary.set_kv_blocks(2);
  summary.set_kv_transport("tcp/lo");
  summary.set_kv_transfer_ms(1.5);
  summary.set_ttft_ms(20);
  summary.set_total_ms(120);
  summary.set_attempts(1);
  summary.set_seed(9);
  summary.set_further_tokens(8);  // the first message had three
  summary.set_decode_ms(80);
  EXPECT_EQ(DescribeSummary(summary, "| ", {{"127.0.0.1:1", "prefill-0"}}),
            "| prompt 100 tokens (64 from cache), output 11 tokens\n"
            "| prefilled at prefill-0, decoded at 127.0.0.1:2\n"
            "| cache moved: 4096 bytes in 2 blocks over tcp/lo in 1.50 ms\n"
            "| first token after 20.0 ms, then 8 in 80.0 ms (100.0 tokens/s), total 120.0 ms, seed "
            "9\n");
  // All in one message: there is no speed to tell.
  summary.set_further_tokens(0);
  summary.set_decode_ms(0);
  EXPECT_THAT(DescribeSummary(summary, ""),
              testing::HasSubstr("first token after 20.0 ms, total 120.0 ms, seed 9\n"));
}

}  // namespace
}  // namespace cli
