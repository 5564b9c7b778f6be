#include "worker/worker_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "CLI/CLI.hpp"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "worker/worker_flags.h"
#include "worker/worker_metrics.h"
#include "worker/worker_runtime.h"

namespace worker {
namespace {

using ::testing::HasSubstr;

TEST(WorkerOptionsTest, DefaultsNeedOnlyAModel) {
  WorkerOptions options;
  EXPECT_THAT(std::string(options.Validate().message()), HasSubstr("--model is missing"));
  options.engine.model_dir = "somewhere";
  EXPECT_TRUE(options.Validate().ok()) << options.Validate();
}

TEST(WorkerOptionsTest, EveryProblemIsNamedAtOnce) {
  WorkerOptions options;
  options.listen = "nowhere";
  options.advertise = "host:0";
  options.engine.device = "abacus";
  options.engine.block_size = 63;
  options.links = "shm,pigeon";
  options.cache_path = "owl";
  options.kv_lease = absl::ZeroDuration();
  options.tls.cert_file = "cert.pem";
  const absl::Status status = options.Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  for (const char* part :
       {"--listen: address \"nowhere\"", "--advertise: \"host:0\"", "--model is missing",
        "--device: \"abacus\"", "--block_size: 63", "--links: \"pigeon\"", "--cache_path: \"owl\"",
        "--kv_lease_s: 0 is not positive", "--tls_key"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST(WorkerOptionsTest, NumbersThatNoMachineHoldsAreRefused) {
  WorkerOptions options;
  options.engine.model_dir = "somewhere";
  options.engine.num_threads = 100'000;
  options.engine.block_size = 1'000'000'000;
  options.engine.limits.max_tokens = 2'147'483'647;
  options.engine.limits.max_seqs = 2'147'483'647;
  const std::string problems(options.Validate().message());
  for (const char* part :
       {"--num_threads: 100000 is not 0 to", "--block_size: 1000000000 is more than",
        "--max_batch_tokens: 2147483647 is not 1 to", "--max_seqs: 2147483647 is not 1 to"}) {
    EXPECT_THAT(problems, HasSubstr(part));
  }
}

TEST(WorkerFlagsTest, WhatIsNoNumberOfItsKindIsRefused) {
  for (const char* flags : {"--kv_lease_s nan", "--kv_lease_s=-nan", "--hash_seed=-1",
                            "--hash_seed 18446744073709551616"}) {
    WorkerOptions options;
    CLI::App app;
    AddWorkerFlags(app, &options);
    EXPECT_THROW(app.parse(flags), CLI::ValidationError) << flags;
  }
  WorkerOptions options;
  CLI::App app;
  AddWorkerFlags(app, &options);
  app.parse("--hash_seed 18446744073709551615 --kv_lease_s inf");
  EXPECT_EQ(options.hash_seed, UINT64_MAX);
  EXPECT_EQ(options.kv_lease, absl::InfiniteDuration());
}

TEST(WorkerFlagsTest, FlagsFillTheOptions) {
  WorkerOptions options;
  CLI::App app;
  AddWorkerFlags(app, &options);
  app.parse(
      "--model dir --num_blocks 12 --links tcp --kv_lease_s 0.25 --max_batch_tokens 128 "
      "--log_json");
  EXPECT_EQ(options.engine.model_dir, "dir");
  EXPECT_EQ(options.num_blocks, 12);
  EXPECT_THAT(options.link_kinds(), testing::ElementsAre("tcp"));
  EXPECT_EQ(options.kv_lease, absl::Milliseconds(250));
  EXPECT_EQ(options.engine.limits.max_tokens, 128);
  EXPECT_TRUE(options.log.json);
  EXPECT_EQ(options.chunk_stall, absl::Seconds(5));
}

TEST(WorkerMetricsTest, NamesAndLabelsAreThoseOfTheReference) {
  auto registry = std::make_shared<prometheus::Registry>();
  WorkerRuntime runtime;
  runtime.model_name = "m";
  runtime.layout_fingerprint = std::string(16, '\x1f');
  WorkerMetrics metrics(registry, runtime);
  metrics.SetBlocks({.free = 1, .cached = 2, .active = 3, .reserved = 4, .held = 5});
  metrics.ObserveStep(StepPhase::kPrefill, 0.003, 17);
  metrics.ObserveTransfer(absl::Milliseconds(4), 1 << 20,
                          {{.name = "csa", .useful = 1000000, .padding = 48576}});
  metrics.CountTransferFailure(absl::AbortedError("x"));
  metrics.CountHandshake(absl::OkStatus());
  metrics.CountLateEvent("reserve");
  const std::string text = prometheus::TextSerializer().Serialize(registry->Collect());
  for (const char* line :
       {"ferry_kv_blocks{state=\"held\"} 5\n", "ferry_step_seconds_count{phase=\"prefill\"} 1\n",
        "ferry_batch_tokens_sum{phase=\"prefill\"} 17\n", "ferry_transfer_bytes_sum 1048576\n",
        "ferry_transfer_group_bytes_total{group=\"csa\",kind=\"padding\"} 48576\n",
        "ferry_transfer_failures_total{reason=\"aborted\"} 1\n",
        "ferry_handshake_total{result=\"ok\"} 1\n", "ferry_late_events_total{kind=\"reserve\"} 1\n",
        "ferry_config_seconds{name=\"kv_lease\"} 30\n",
        "fingerprint=\"1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f\""}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

}  // namespace
}  // namespace worker
