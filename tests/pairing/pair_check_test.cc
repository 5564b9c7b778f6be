#include "pairing/pair_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "ferry/v1/kv_transfer.pb.h"
#include "ferry/v1/worker.pb.h"
#include "status/grpc_status.h"

namespace pairing {
namespace {

ferry::v1::LayoutRecord Record() {
  ferry::v1::LayoutRecord record;
  record.set_schema(1);
  record.set_model("m");
  record.set_weights("abc");
  record.set_block_size(64);
  record.set_block_bytes(4096);
  record.set_byte_order("little");
  auto* group = record.add_groups();
  group->set_name("latent");
  group->set_layers(2);
  group->set_format("float32");
  return record;
}

Profile Worker(const std::string& name, std::vector<Link> links) {
  return {.name = name, .layout = LayoutFields(Record()), .links = std::move(links)};
}

// A prefill worker P and a decode worker D with these links.
absl::Status Check(std::vector<Link> prefill, std::vector<Link> decode) {
  return CheckPair(Worker("P", std::move(prefill)), Worker("D", std::move(decode)));
}

void ExpectIncompatible(const absl::Status& status, const std::string& message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status::Reason(status), status::kIncompatible);
  EXPECT_EQ(status.message(), message);
}

TEST(PairCheckTest, EqualLayoutsWithACommonLinkFit) {
  EXPECT_TRUE(Check({{"tcp", "h1"}}, {{"shm", "h2"}, {"tcp", "h2"}}).ok());
  EXPECT_TRUE(Check({{"shm", "h1"}}, {{"shm", "h1"}}).ok());
}

TEST(PairCheckTest, TheFirstDifferenceIsNamedWithBothValues) {
  struct Case {
    void (*change)(ferry::v1::LayoutRecord&);
    const char* message;
  };
  const Case cases[] = {
      {[](auto& r) { r.set_schema(2); }, "layout schema is 1 at P and 2 at D"},
      {[](auto& r) { r.set_model("n"); }, "model is m at P and n at D"},
      {[](auto& r) { r.set_weights("x"); }, "weights digest is abc at P and x at D"},
      {[](auto& r) { r.set_block_size(128); }, "block_size is 64 at P and 128 at D"},
      {[](auto& r) { r.add_groups(); }, "number of cache groups is 1 at P and 2 at D"},
      {[](auto& r) { r.mutable_groups(0)->set_name("csa"); },
       "name of cache group 0 is latent at P and csa at D"},
      {[](auto& r) { r.mutable_groups(0)->set_layers(3); },
       "layers of cache group latent is 2 at P and 3 at D"},
      {[](auto& r) { r.mutable_groups(0)->set_format("fp8"); },
       "kv_cache_dtype of cache group latent is float32 at P and fp8 at D"},
      {[](auto& r) { r.mutable_groups(0)->set_entry_bytes(1); },
       "entry_bytes of cache group latent is 0 at P and 1 at D"},
      {[](auto& r) { r.mutable_groups(0)->set_tokens_per_entry(4); },
       "tokens_per_entry of cache group latent is 0 at P and 4 at D"},
      {[](auto& r) { r.mutable_groups(0)->set_layer_stride_bytes(8); },
       "layer_stride_bytes of cache group latent is 0 at P and 8 at D"},
      {[](auto& r) { r.set_block_bytes(1); }, "block_bytes is 4096 at P and 1 at D"},
      {[](auto& r) { r.set_state_slot_bytes(9); }, "state_slot_bytes is 0 at P and 9 at D"},
      {[](auto& r) { r.set_byte_order("big"); }, "byte_order is little at P and big at D"},
      {[](auto& r) { r.set_fingerprint("\x1f"); },
       "layout fingerprint is nothing at P and 1f at D"},
  };
  for (const Case& c : cases) {
    ferry::v1::LayoutRecord theirs = Record();
    c.change(theirs);
    Profile decode = Worker("D", {{"tcp", ""}});
    decode.layout = LayoutFields(theirs);
    ExpectIncompatible(CheckPair(Worker("P", {{"tcp", ""}}), decode), c.message);
  }
}

// A field that is added to the record must be compared, too.
TEST(PairCheckTest, EveryFieldOfTheRecordIsCompared) {
  const auto* record = ferry::v1::LayoutRecord::descriptor();
  const auto* group = ferry::v1::LayoutGroup::descriptor();
  // Without the groups themselves, with their number.
  EXPECT_EQ(LayoutFields(Record()).size(),
            static_cast<size_t>(record->field_count() + group->field_count()));
}

TEST(PairCheckTest, WorkersWithoutACommonLinkDoNotFit) {
  ExpectIncompatible(Check({{"shm", "h1"}}, {{"tcp", "h1"}}),
                     "no data link in common: --links is shm at P and tcp at D");
  ExpectIncompatible(Check({{"shm", "h1"}, {"tcp", "h1"}}, {{"shm", "h2"}}),
                     "no data link in common: --links is shm,tcp at P and shm at D, and shm links "
                     "only processes of one host, IPC namespace and user");
  ExpectIncompatible(Check({}, {{"tcp", "h"}}),
                     "no data link in common: --links is none at P and tcp at D");
}

TEST(PairCheckTest, HandshakeAndGetInfoSayTheSame) {
  ferry::v1::HandshakeRequest request;
  *request.mutable_layout() = Record();
  ferry::v1::LinkAddress* link = request.add_links();
  link->set_kind("shm");
  link->set_host_id("h");
  ferry::v1::WorkerInfo info;
  *info.mutable_layout() = Record();
  info.add_transports("shm");
  info.set_host_id("h");
  EXPECT_TRUE(CheckPair(ProfileOf(request, "P"), ProfileOf(info, "D")).ok());
  info.set_host_id("another");
  EXPECT_FALSE(CheckPair(ProfileOf(request, "P"), ProfileOf(info, "D")).ok());
}

}  // namespace
}  // namespace pairing
