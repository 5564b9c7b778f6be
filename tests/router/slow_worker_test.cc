// A worker that computes prompts more slowly than it says is found out by its own answers.

#include <prometheus/text_serializer.h>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::FakeWorker;

TEST_F(RouterFixture, PromptsGoToTheWorkerThatIsAsFastAsItSays) {
  FakeWorker* const slow = Prefill();
  FakeWorker* const fast = Prefill();
  Decode();
  slow->slowness = 4;
  fast->slowness = 1;
  StartRouter();
  constexpr int kRequests = 20;
  for (int i = 0; i < kRequests; ++i) {
    ASSERT_EQ(Generate(Tokens(4000, 1 + i)).status, absl::OkStatus());
  }
  // Both look alike until the slow one has had its first.
  EXPECT_EQ(slow->prefills().size(), 1u);
  EXPECT_EQ(fast->prefills().size(), kRequests - 1u);
  const auto gauge = [this](const FakeWorker& worker) {
    const std::string text = prometheus::TextSerializer().Serialize(metrics_->Collect());
    const std::string name =
        absl::StrCat("ferry_router_prefill_slowdown{worker=\"", worker.address(), "\"} ");
    const size_t at = text.find(name);
    return at == std::string::npos ? 0 : std::stod(text.substr(at + name.size()));
  };
  EXPECT_TRUE(Eventually([&] { return gauge(*slow) > 1.3 && gauge(*slow) < 4; }));
  EXPECT_TRUE(Eventually([&] { return gauge(*fast) == 1; }));
}

}  // namespace
}  // namespace router
