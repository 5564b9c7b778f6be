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
  options.accept_limit = absl::ZeroDuration();
  options.cancel_ack = absl::Seconds(-1);
  options.tls.cert_file = "cert";
  options.http_listen = "8000";
  options.tenant_max_running = -1;
  options.tenant_max_rate = -0.5;
  options.tenant_limits = {"a=1:2", "c=1:2:0.5", "b=1"};
  options.kv_watermark = 1.5;
  options.breaker_failures = -1;
  options.max_ttft = absl::Seconds(-1);
  const absl::Status status = options.Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("--workers: a:1 is named twice"), HasSubstr("\"nowhere\" is not host:port"),
            HasSubstr("--policy: \"best\""), HasSubstr("--max_attempts: 0"),
            HasSubstr("--max_migrations: -1"), HasSubstr("\"dns:///c\" is neither"),
            HasSubstr("--dns_refresh_s: 0"), HasSubstr("--otlp_endpoint: \"collector:4318\""),
            HasSubstr("--trace_ratio: 1.5"), HasSubstr("--heartbeat_s: 0"),
            HasSubstr("--accept_limit_s: 0"), HasSubstr("--cancel_ack_s: -1s"),
            HasSubstr("--tls_cert and --tls_key"), HasSubstr("--http_listen: "),
            HasSubstr("--tenant_max_running: -1"), HasSubstr("--tenant_max_rate: -0.5"),
            HasSubstr("--tenant_limit: \"b=1\" is not NAME=RUNNING:QUEUED"),
            HasSubstr("--kv_watermark: 1.5"), HasSubstr("--breaker_failures: -1"),
            HasSubstr("--max_ttft_s: -1s is negative")));
  for (const char* const no_host : {"http://", "https:///v1", "http://:4318"}) {
    options.otlp_endpoint = no_host;
    EXPECT_THAT(std::string(options.Validate().message()),
                HasSubstr(std::string("--otlp_endpoint: \"") + no_host + "\" is no http://"));
  }
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

TEST(RouterOptionsTest, TenantLimitsAreRead) {
  const auto limits = ParseTenantLimits({"acme=8:16", "x=y=1:0"});
  EXPECT_THAT(std::string(limits.status().message()), HasSubstr("\"x=y=1:0\" is not"));
  const auto good = ParseTenantLimits({"acme=8:16", "other.org=0:5:0.5"});
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(good->at("acme").max_running, 8);
  EXPECT_EQ(good->at("acme").max_queued, 16);
  EXPECT_EQ(good->at("acme").max_rate, 0);
  EXPECT_EQ(good->at("other.org").max_running, 0);
  EXPECT_EQ(good->at("other.org").max_rate, 0.5);
  for (const char* bad : {"", "=1:2", "a", "a=", "a=1:-2", "a=one:2", "a=1:2:", "a=1:2:-1",
                          "a=1:2:nan", "a=1:2:3:4"}) {
    EXPECT_FALSE(ParseTenantLimits({bad}).ok()) << bad;
  }
  EXPECT_THAT(std::string(ParseTenantLimits({"a=1:2", "a=1:2"}).status().message()),
              HasSubstr("a is named twice"));
}

}  // namespace
}  // namespace router
