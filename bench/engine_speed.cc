// engine_speed: an engine by itself on random weights: how long prompts take until their first
// tokens, and how long each further token takes with every sequence decoding.
//   engine_speed --config bench/models/deepseek-v2-lite --device cuda --batch 1 --batch 100
//   engine_speed --config bench/models/deepseek-v3.2-4l --device cuda --kv_cache_dtype fp8 --prompt
//   64000 --output 1 engine_speed --config bench/models/deepseek-v3.2-4l --device cuda
//   --kv_cache_dtype fp8 --context 4096 --context 131072
//
// Prompts are of one length and share nothing; sampling is greedy.  Decode steps are launched while
// the one before runs, as a decode worker does it.
//
// --timeline runs all once more and records when each kernel of a decode step starts and ends.
//
// With --context there are no prompts: sequences begin with so many tokens cached, whose entries
// are those of a short prompt over and over, copied block by block.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/kernel_trace.h"
#include "engine/block_pool.h"
#include "engine/cache_memory.h"
#include "engine/engine.h"
#include "engine/plan_builder.h"
#include "model/cache_spec.h"
#include "model/config.h"
#include "nlohmann/json.hpp"

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
  int32_t context = 0;   // tokens cached at the start; 0: the prompt is computed
};

// The kernels of one step in the middle of `num_steps`, which begins with the first kernel of those
// that run once a step.  Microseconds since its start: [[name, start, end], ...].
nlohmann::json MiddleStep(const std::vector<bench::KernelSpan>& spans, int32_t num_steps) {
  std::map<std::string, int32_t> runs;
  for (const bench::KernelSpan& span : spans) ++runs[span.name];
  const auto first = std::find_if(spans.begin(), spans.end(), [&](const bench::KernelSpan& span) {
    return runs[span.name] == num_steps;
  });
  nlohmann::json kernels = nlohmann::json::array();
  if (first == spans.end()) return kernels;
  int32_t step = -1;
  int64_t start_ns = 0;
  for (const bench::KernelSpan& span : spans) {
    if (span.name == first->name && ++step == num_steps / 2) start_ns = span.start_ns;
    if (step != num_steps / 2) continue;
    const auto us = [&](int64_t ns) { return 1e-3 * static_cast<double>(ns - start_ns); };
    kernels.push_back({span.name, us(span.start_ns), us(span.end_ns)});
  }
  return kernels;
}

constexpr int32_t kSeedTokens = 4096;  // whose entries fill a context

// Copies within a cache, wherever it lies.
class CacheCopier {
 public:
  explicit CacheCopier(engine::Engine* engine) : copies_(Check(engine->MakeCopies())) {}

  void Copy(absl::Span<const std::byte> from, absl::Span<std::byte> to) {
    if (copies_ == nullptr) {
      std::memcpy(to.data(), from.data(), from.size());
      return;
    }
    if (host_ == nullptr || host_->size_bytes() < static_cast<int64_t>(from.size())) {
      host_ = Check(copies_->AllocateHost(static_cast<int64_t>(from.size())));
    }
    const absl::Span<std::byte> host(host_->data(), from.size());
    Wait([&](auto done) { copies_->ToHost(host, from.data(), done); });
    Wait([&](auto done) { copies_->ToDevice(to.data(), host, done); });
  }

 private:
  template <typename Start>
  static void Wait(const Start& start) {
    std::promise<absl::Status> ended;
    start([&ended](absl::Status status) { ended.set_value(std::move(status)); });
    Check(ended.get_future().get());
  }

  std::unique_ptr<kernels::Buffer> host_;
  std::unique_ptr<kernels::DeviceCopies> copies_;
};

class Bench {
 public:
  Bench(const engine::EngineOptions& options, int32_t num_blocks, int32_t max_seqs)
      : engine_(Check(engine::Engine::Create(options))), pool_(num_blocks) {
    memory_ = std::make_unique<engine::CacheMemory>(
        Check(engine::CacheMemory::Map(num_blocks * block_bytes())));
    if (slot_bytes() > 0) {
      slots_ = std::make_unique<engine::CacheMemory>(
          Check(engine::CacheMemory::Map((max_seqs + 2) * slot_bytes())));
    }
    engine_->SetCache(memory_->span(),
                      slots_ == nullptr ? absl::Span<std::byte>() : slots_->span());
    for (int32_t i = 0; i < 2; ++i) {
      plans_[i] = std::make_unique<model::StepPlan>(engine_->limits());
      builders_[i] = std::make_unique<engine::PlanBuilder>(block_size(), *plans_[i]);
    }
  }

  // Prints a line, and returns its numbers; with a trace those of a decode step's kernels too.
  nlohmann::json Run(const Load& load, bench::KernelTrace* trace = nullptr) {
    std::vector<engine::Sequence> seqs;
    for (int32_t i = 0; i < load.batch; ++i) {
      seqs.push_back(NewSequence(i, load.context > 0 ? load.context + 1 : load.prompt));
    }
    ++salt_;
    nlohmann::json row = {{"batch", load.batch}, {"output", load.output}};
    if (load.context > 0) {
      FillContexts(seqs, load.context);
      row["context"] = load.context;
      std::printf("batch %4d, context %6d: ", load.batch, load.context);
    } else {
      const auto [first_ms, prefill_ms] = Prefill(seqs);
      row["prompt"] = load.prompt;
      row["first_ms"] = first_ms;
      row["prefill_ms"] = prefill_ms;
      std::printf(
          "batch %4d, prompt %5d, output %4d: first token %8.2f ms, all first tokens %9.2f ms "
          "(%8.0f tokens/s)%s",
          load.batch, load.prompt, load.output, first_ms, prefill_ms,
          1e3 * load.batch * load.prompt / prefill_ms, load.output > 1 ? ", then " : "");
    }
    if (load.output > 1) {
      const int32_t steps = load.output - 1;
      if (trace != nullptr) trace->Start();
      const auto [decode_ms, device_ms] = Decode(seqs, steps);
      if (trace != nullptr) row["kernels"] = MiddleStep(trace->Stop(), steps);
      row["step_ms"] = decode_ms / steps;
      row["device_step_ms"] = device_ms / steps;
      std::printf("%7.3f ms a token (%7.3f on the device), %8.0f tokens/s", decode_ms / steps,
                  device_ms / steps, 1e3 * load.batch * steps / decode_ms);
    }
    std::printf("\n");
    std::fflush(stdout);
    for (engine::Sequence& seq : seqs) engine::ReleaseBlocks(seq, pool_);
    return row;
  }

 private:
  struct Flight {
    engine::StepHandle handle = 0;
    int64_t step = 0;
    std::vector<std::pair<engine::Sequence*, int32_t>> samples;
  };

  int32_t block_size() const { return engine_->cache_layout().spec().block_size; }
  int64_t block_bytes() const { return engine_->cache_layout().block_bytes(); }
  int64_t slot_bytes() const { return engine_->cache_layout().spec().state_slot_bytes; }

  engine::Sequence NewSequence(int32_t index, int32_t num_tokens) const {
    engine::Sequence seq;
    const int32_t vocab = engine_->network().config().vocab_size;
    for (int32_t t = 0; t < num_tokens; ++t) {
      seq.tokens.push_back(static_cast<int32_t>((t * 7919 + index * 104729 + salt_) % vocab));
    }
    seq.num_prompt_tokens = num_tokens;
    seq.sampling.temperature = 0;
    if (slot_bytes() > 0) {
      seq.state_slot = 1 + index;
      seq.state_source = engine::kZeroSlot;
    }
    return seq;
  }

  // Until the first token, and until every first token.
  std::pair<double, double> Prefill(std::vector<engine::Sequence>& seqs) {
    const auto start = Clock::now();
    double first_ms = 0;
    for (size_t next = 0; next < seqs.size();) {
      engine::PlanBuilder& builder = Begin();
      Flight flight;
      while (next < seqs.size() && builder.free_tokens() > 0 && builder.free_seqs() > 0) {
        engine::Sequence& seq = seqs[next];
        const int32_t left = seq.num_prompt_tokens - seq.num_computed;
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
    return {first_ms == 0 ? prefill_ms : first_ms, prefill_ms};
  }

  // The first `context` tokens of each count as computed: their blocks hold those of a prompt of
  // kSeedTokens, in another order for each, and their states its state.
  void FillContexts(std::vector<engine::Sequence>& seqs, int32_t context) {
    std::vector<engine::Sequence> seed;
    seed.push_back(NewSequence(static_cast<int32_t>(seqs.size()), std::min(context, kSeedTokens)));
    Prefill(seed);
    CacheCopier copier(engine_.get());
    const auto span_of = [](absl::Span<std::byte> memory, int64_t size, int64_t piece) {
      return memory.subspan(piece * size, size);
    };
    const engine::CacheSpans cache = engine_->cache();
    const auto block = [&](int32_t id) { return span_of(cache.token_blocks, block_bytes(), id); };
    const auto slot = [&](int32_t id) { return span_of(cache.state_slots, slot_bytes(), id); };
    for (size_t i = 0; i < seqs.size(); ++i) {
      engine::Sequence& seq = seqs[i];
      Check(engine::GrowBlocks(seq, context, block_size(), pool_));
      for (size_t b = 0; b < seq.blocks.size(); ++b) {
        copier.Copy(block(seed[0].blocks[(b + i) % seed[0].blocks.size()]), block(seq.blocks[b]));
      }
      if (slot_bytes() > 0) {
        copier.Copy(slot(seed[0].state_slot), slot(seq.state_slot));
        seq.state_source = engine::kNoSlot;
      }
      seq.num_computed = context;
    }
    engine::ReleaseBlocks(seed[0], pool_);
  }

  // In all, by the wall clock and on the device.
  std::pair<double, double> Decode(std::vector<engine::Sequence>& seqs, int32_t steps) {
    const auto start = Clock::now();
    double device_ms = 0;
    for (int32_t i = 0; i < steps; ++i) {
      engine::PlanBuilder& builder = Begin();
      Flight flight;
      for (engine::Sequence& seq : seqs) Add(builder, seq, 1, /*absorbed=*/true, true, flight);
      Launch(std::move(flight));
      if (flights_.size() == 2) device_ms += Collect();
    }
    while (!flights_.empty()) device_ms += Collect();
    return {MsSince(start), device_ms};
  }

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
  std::unique_ptr<engine::CacheMemory> slots_;   // the same; null: the model keeps no state
  std::unique_ptr<engine::Engine> engine_;
  engine::BlockPool pool_;
  std::unique_ptr<model::StepPlan> plans_[2];
  std::unique_ptr<engine::PlanBuilder> builders_[2];
  std::deque<Flight> flights_;
  int64_t step_ = 0;
  int64_t salt_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("An engine by itself on random weights");
  engine::EngineOptions options;
  options.random_weights = true;
  options.limits.max_tokens = 4096;
  options.num_penalty_slots = 1;
  Load load;
  std::vector<int32_t> batches = {1}, prompts, contexts;
  std::string json_path, timeline_path;
  int32_t repeat = 2;
  app.add_option("--config", options.model_dir, "directory of a config.json")->required();
  app.add_option("--device", options.device, "cpu or cuda")->capture_default_str();
  app.add_option("--dtype", options.dtype, "auto, float32 or bfloat16")->capture_default_str();
  app.add_option("--kv_cache_dtype", options.kv_cache_dtype, "as of a worker")
      ->capture_default_str();
  app.add_option("--threads", options.num_threads, "CPU threads")->capture_default_str();
  app.add_option("--max_tokens", options.limits.max_tokens, "of a step")->capture_default_str();
  app.add_option("--batch", batches, "sequences together")->capture_default_str();
  app.add_option("--prompt", prompts, "tokens; without --context one of 999");
  app.add_option("--context", contexts, "tokens cached at the start, instead of a prompt");
  app.add_option("--output", load.output, "tokens")->capture_default_str();
  app.add_option("--repeat", repeat, "runs of each, the first to warm up")->capture_default_str();
  app.add_option("--json", json_path, "file that receives the numbers of the last runs");
  app.add_option("--timeline", timeline_path, "file that receives the kernels of a step of each");
  CLI11_PARSE(app, argc, argv);
  if (prompts.empty() && contexts.empty()) prompts = {999};
  std::unique_ptr<bench::KernelTrace> trace;
  if (!timeline_path.empty()) trace = std::make_unique<bench::KernelTrace>();
  int32_t longest = 0;
  for (const auto* lengths : {&prompts, &contexts}) {
    for (const int32_t length : *lengths) longest = std::max(longest, length);
  }
  options.max_model_len = longest + 1 + load.output;
  const int32_t max_batch = *std::max_element(batches.begin(), batches.end());
  options.limits.max_absorbed_tokens = options.limits.max_seqs = options.limits.max_samples =
      max_batch;
  const model::ModelConfig config = Check(model::LoadModelConfig(options.model_dir));
  const int32_t block_size = model::DefaultBlockSize(config);
  const int32_t per_seq = engine::BlocksFor(options.max_model_len, block_size);
  const auto start = Clock::now();
  Bench bench(options, per_seq * max_batch + engine::BlocksFor(kSeedTokens, block_size) + 1,
              max_batch);
  const double load_s = MsSince(start) / 1e3;
  std::printf("loaded in %.1f s\n", load_s);
  nlohmann::json rows = nlohmann::json::array(), timelines = nlohmann::json::array();
  const auto run = [&] {
    nlohmann::json row;
    for (int32_t i = 0; i < repeat; ++i) row = bench.Run(load);
    rows.push_back(std::move(row));
    if (trace != nullptr) timelines.push_back(bench.Run(load, trace.get()));
  };
  for (const int32_t batch : batches) {
    load.batch = batch;
    load.context = 0;
    for (const int32_t prompt : prompts) {
      load.prompt = prompt;
      run();
    }
    for (const int32_t context : contexts) {
      load.context = context;
      run();
    }
  }
  if (!json_path.empty()) std::ofstream(json_path) << rows.dump(1) << "\n";
  if (trace != nullptr) std::ofstream(timeline_path) << timelines.dump() << "\n";
}
