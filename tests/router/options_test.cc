#include "router/options.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace router {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(RouterOptionsTest, NamesEveryProblemAtOnce) {
  RouterOptions options;
  options.model_assets = {"dir"};
  options.workers = {"a:1", "b:2", "dns:///c:3", "dns:///_grpc._tcp.d"};
  EXPECT_EQ(options.Validate(), absl::OkStatus());
  options.workers = {"a:1", "a:1", "nowhere", "dns:///c"};
  options.dns_refresh = absl::ZeroDuration();
  options.policy = "best";
  options.otlp_endpoint = "collector:4318";
  options.trace_ratio = 1.5;
  options.max_attempts = 0;
  options.max_migrations = -1;
  options.heartbeat = absl::ZeroDuration();
  options.tls.cert_file = "cert";
  options.http_listen = "8000";
  const absl::Status status = options.Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("--workers: a:1 is named twice"), HasSubstr("\"nowhere\" is not host:port"),
            HasSubstr("--policy: \"best\""), HasSubstr("--max_attempts: 0"),
            HasSubstr("--max_migrations: -1"), HasSubstr("\"dns:///c\" is neither"),
            HasSubstr("--dns_refresh_s: 0"), HasSubstr("--otlp_endpoint: \"collector:4318\""),
            HasSubstr("--trace_ratio: 1.5"), HasSubstr("--heartbeat_s: 0"),
            HasSubstr("--tls_cert and --tls_key"), HasSubstr("--http_listen: ")));
  options.http_listen = options.listen;
  EXPECT_THAT(std::string(options.Validate().message()),
              HasSubstr("--listen and --http_listen are both 0.0.0.0:8500"));
  options.http_listen = "";
  options.api_keys_file = "keys";
  EXPECT_THAT(std::string(options.Validate().message()),
              HasSubstr("--api_keys_file needs --http_listen"));
  EXPECT_THAT(std::string(RouterOptions().Validate().message()),
              AllOf(HasSubstr("--model_assets is missing"), HasSubstr("--workers is missing")));
}

}  // namespace
}  // namespace router
