// engine_speed: an engine by itself on random weights: how long prompts take until their first
// tokens, and how long each further token takes with every sequence decoding.
//   engine_speed --config bench/models/deepseek-v2-lite --device cuda --batch 1 --batch 100
//
// Prompts are of one length and share nothing; sampling is greedy.  Decode steps are launched while
// the one before runs, as a decode worker does it.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "engine/block_pool.h"
#include "engine/cache_memory.h"
#include "engine/engine.h"
#include "engine/plan_builder.h"

namespace {

using Clock = std::chrono::steady_clock;

template <typename T>
T Check(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "engine_speed: %s\n", std::string(value.status().message()).c_str());
  std::exit(1);
}
void Check(const absl::Status& status) { Check(status.ok() ? absl::StatusOr<int>(0) : status); }

double MsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

struct Load {
  int32_t batch = 1;
  int32_t prompt = 999;  // tokens
  int32_t output = 100;  // tokens
};

class Bench {
 public:
  Bench(const engine::EngineOptions& options, int32_t num_blocks)
      : engine_(Check(engine::Engine::Create(options))), pool_(num_blocks) {
    memory_ = std::make_unique<engine::CacheMemory>(Check(
        engine::CacheMemory::Map(int64_t{num_blocks} * engine_->cache_layout().block_bytes())));
    engine_->SetCache(memory_->span(), {});
    for (int32_t i = 0; i < 2; ++i) {
      plans_[i] = std::make_unique<model::StepPlan>(engine_->limits());
      builders_[i] = std::make_unique<engine::PlanBuilder>(block_size(), *plans_[i]);
    }
  }

  void Run(const Load& load) {
    std::vector<engine::Sequence> seqs(load.batch);
    const int32_t vocab = engine_->network().config().vocab_size;
    for (int32_t i = 0; i < load.batch; ++i) {
      for (int32_t t = 0; t < load.prompt; ++t) {
        seqs[i].tokens.push_back((t * 7919 + i * 104729 + salt_) % vocab);
      }
      seqs[i].num_prompt_tokens = load.prompt;
      seqs[i].sampling.temperature = 0;
    }
    ++salt_;
    const auto start = Clock::now();
    double first_ms = 0;
    for (size_t next = 0; next < seqs.size();) {
      engine::PlanBuilder& builder = Begin();
      Flight flight;
      while (next < seqs.size() && builder.free_tokens() > 0 && builder.free_seqs() > 0) {
        engine::Sequence& seq = seqs[next];
        const int32_t left = load.prompt - seq.num_computed;
        const int32_t rows = std::min(left, builder.free_tokens());
        if (!Add(builder, seq, rows, /*absorbed=*/false, rows == left, flight)) break;
        if (rows == left) ++next;
      }
      Launch(std::move(flight));
      if (flights_.size() == 2) Collect();
      if (first_ms == 0 && seqs[0].num_output_tokens() > 0) first_ms = MsSince(start);
    }
    while (!flights_.empty()) Collect();
    const double prefill_ms = MsSince(start);
    if (first_ms == 0) first_ms = prefill_ms;

    const auto decode_start = Clock::now();
    double device_ms = 0;
    for (int32_t i = 1; i < load.output; ++i) {
      engine::PlanBuilder& builder = Begin();
      Flight flight;
      for (engine::Sequence& seq : seqs) Add(builder, seq, 1, /*absorbed=*/true, true, flight);
      Launch(std::move(flight));
      if (flights_.size() == 2) device_ms += Collect();
    }
    while (!flights_.empty()) device_ms += Collect();
    const double decode_ms = MsSince(decode_start);
    const int32_t steps = load.output - 1;
    std::printf(
        "batch %4d, prompt %5d, output %4d: first token %8.2f ms, all first tokens %9.2f ms "
        "(%8.0f tokens/s), then %7.3f ms a token (%7.3f on the device), %8.0f tokens/s\n",
        load.batch, load.prompt, load.output, first_ms, prefill_ms,
        1e3 * load.batch * load.prompt / prefill_ms, decode_ms / steps, device_ms / steps,
        1e3 * load.batch * steps / decode_ms);
    std::fflush(stdout);
    for (engine::Sequence& seq : seqs) engine::ReleaseBlocks(seq, pool_);
  }

 private:
  struct Flight {
    engine::StepHandle handle = 0;
    int64_t step = 0;
    std::vector<std::pair<engine::Sequence*, int32_t>> samples;
  };

  int32_t block_size() const { return engine_->cache_layout().spec().block_size; }
  engine::PlanBuilder& Begin() {
    engine::PlanBuilder& builder = *builders_[step_ % 2];
    builder.Begin(step_);
    return builder;
  }
  // False: the step has no room for it.
  bool Add(engine::PlanBuilder& builder, engine::Sequence& seq, int32_t rows, bool absorbed,
           bool sample, Flight& flight) {
    if (builder.free_samples() == 0) return false;
    Check(engine::GrowBlocks(seq, seq.num_computed + rows, block_size(), pool_));
    const int32_t index = builder.Add(seq, rows, absorbed, sample);
    if (sample) flight.samples.emplace_back(&seq, index);
    return true;
  }
  void Launch(Flight flight) {
    flight.step = step_;
    flight.handle = Check(engine_->Launch(builders_[step_++ % 2]->plan()));
    flights_.push_back(std::move(flight));
  }
  // Returns the step's time on the device.
  double Collect() {
    const Flight flight = std::move(flights_.front());
    flights_.pop_front();
    const engine::StepResult result = Check(engine_->Collect(flight.handle));
    for (const auto& [seq, sample] : flight.samples) {
      engine::AcceptToken(*seq, flight.step, result.samples[sample].token_id);
    }
    return result.step_ms;
  }

  std::unique_ptr<engine::CacheMemory> memory_;  // outlives the engine
  std::unique_ptr<engine::Engine> engine_;
  engine::BlockPool pool_;
  std::unique_ptr<model::StepPlan> plans_[2];
  std::unique_ptr<engine::PlanBuilder> builders_[2];
  std::deque<Flight> flights_;
  int64_t step_ = 0;
  int32_t salt_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("An engine by itself on random weights");
  engine::EngineOptions options;
  options.random_weights = true;
  options.block_size = 64;
  options.limits.max_tokens = 4096;
  options.limits.max_absorbed_tokens = 128;
  options.limits.max_seqs = 128;
  options.limits.max_samples = 128;
  options.num_penalty_slots = 1;
  Load load;
  std::vector<int32_t> batches = {1};
  int32_t repeat = 2;
  app.add_option("--config", options.model_dir, "directory of a config.json")->required();
  app.add_option("--device", options.device, "cpu or cuda")->capture_default_str();
  app.add_option("--dtype", options.dtype, "auto, float32 or bfloat16")->capture_default_str();
  app.add_option("--kv_cache_dtype", options.kv_cache_dtype, "as of a worker")
      ->capture_default_str();
  app.add_option("--threads", options.num_threads, "CPU threads")->capture_default_str();
  app.add_option("--max_tokens", options.limits.max_tokens, "of a step")->capture_default_str();
  app.add_option("--batch", batches, "sequences together")->capture_default_str();
  app.add_option("--prompt", load.prompt, "tokens")->capture_default_str();
  app.add_option("--output", load.output, "tokens")->capture_default_str();
  app.add_option("--repeat", repeat, "runs of each, the first to warm up")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  options.max_model_len = load.prompt + load.output;
  options.block_size = 64;
  const int32_t per_seq = engine::BlocksFor(options.max_model_len, options.block_size);
  const auto start = Clock::now();
  Bench bench(options, per_seq * *std::max_element(batches.begin(), batches.end()) + 1);
  std::printf("loaded in %.1f s\n", MsSince(start) / 1e3);
  for (const int32_t batch : batches) {
    load.batch = batch;
    for (int32_t i = 0; i < repeat; ++i) bench.Run(load);
  }
}
