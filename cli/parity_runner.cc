#include "cli/parity_runner.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "block_hash/block_hash.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace cli {
namespace {

using engine::Sequence;

constexpr int32_t kChunkTokens = 48;
constexpr int32_t kPrefillBeforeDecode = 8;
int32_t Length(const ParityCase& golden) { return static_cast<int32_t>(golden.ids.size()); }

// The first position whose logits are compared.
int32_t FirstCompared(const ParityCase& golden) { return Length(golden) - golden.num_logit_rows; }

// Gives a sequence's blocks back when a case is done, also when it failed half-way.
class ScopedSequence {
 public:
  ScopedSequence(EngineSession& session, absl::Span<const int32_t> tokens)
      : session_(session), seq_(session.NewSequence(tokens)) {}
  ScopedSequence(const ScopedSequence&) = delete;
  ScopedSequence& operator=(const ScopedSequence&) = delete;
  ~ScopedSequence() { engine::ReleaseBlocks(seq_, session_.pool()); }
  Sequence& get() { return seq_; }

 private:
  EngineSession& session_;
  Sequence seq_;
};

// Computes the next `num_tokens` of the prompt; the logits that are compared go to `run`, and the
// step that ends the prompt samples the first token.
absl::Status Compute(EngineSession& session, const ParityCase& golden, Sequence& seq,
                     int32_t num_tokens, bool absorbed, CaseRun& run) {
  const bool last = seq.num_computed + num_tokens == Length(golden);
  ASSIGN_OR_RETURN(const EngineSession::StepReply reply,
                   session.Step(seq, {.num_tokens = num_tokens,
                                      .absorbed = absorbed,
                                      .sample = last,
                                      .logits_from = FirstCompared(golden)}));
  run.logits.insert(run.logits.end(), reply.logits.begin(), reply.logits.end());
  if (last && !golden.greedy.empty()) run.generated.push_back(reply.token);
  return absl::OkStatus();
}

// The prompt's remaining tokens, one by one in absorbed form.
absl::Status DecodePrompt(EngineSession& session, const ParityCase& golden, Sequence& seq,
                          CaseRun& run) {
  while (seq.num_computed < Length(golden)) {
    RETURN_IF_ERROR(Compute(session, golden, seq, 1, /*absorbed=*/true, run));
  }
  return absl::OkStatus();
}

// What follows the first generated token.
absl::Status Generate(EngineSession& session, const ParityCase& golden, Sequence& seq,
                      CaseRun& run) {
  for (size_t step = run.generated.size(); step < golden.greedy.size(); ++step) {
    session.Accept(seq, golden.greedy[step - 1]);
    ASSIGN_OR_RETURN(const EngineSession::StepReply reply,
                     session.Step(seq, {.num_tokens = 1, .absorbed = true, .sample = true}));
    run.generated.push_back(reply.token);
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view ParityPathName(ParityPath path) {
  switch (path) {
    case ParityPath::kWhole:
      return "whole";
    case ParityPath::kChunked:
      return "chunked";
    case ParityPath::kDecode:
      return "decode";
    case ParityPath::kTransfer:
      return "transfer";
  }
  return "unknown";
}

absl::StatusOr<std::unique_ptr<ParityRunner>> ParityRunner::Create(
    const ParityOptions& options, absl::Span<const ParityCase> cases) {
  int32_t longest_prompt = 0;
  int32_t longest = 0;
  for (const ParityCase& golden : cases) {
    longest_prompt = std::max(longest_prompt, Length(golden));
    longest = std::max(longest, Length(golden) + static_cast<int32_t>(golden.greedy.size()));
  }
  std::unique_ptr<ParityRunner> runner(new ParityRunner());
  runner->engine_options_ = {.model_dir = options.model_dir,
                             .device = options.device,
                             .dtype = options.dtype,
                             .kv_cache_dtype = options.kv_cache_dtype,
                             .max_model_len = longest,
                             .num_penalty_slots = 1,
                             .limits = {.max_tokens = longest_prompt,
                                        .max_absorbed_tokens = 1,
                                        .max_seqs = 1,
                                        .max_samples = 1,
                                        .max_logit_rows = 64,
                                        .max_copies = 1}};
  // Two sequences at a time: a cached prefix and the one that uses it.
  ASSIGN_OR_RETURN(const model::ModelConfig config, model::LoadModelConfig(options.model_dir));
  runner->num_blocks_ = 2 * engine::BlocksFor(longest, model::DefaultBlockSize(config));
  ASSIGN_OR_RETURN(runner->session_,
                   EngineSession::Create(runner->engine_options_, runner->num_blocks_));
  return runner;
}

absl::StatusOr<CaseRun> ParityRunner::Run(ParityPath path, const ParityCase& golden) {
  CaseRun run;
  switch (path) {
    case ParityPath::kWhole:
      RETURN_IF_ERROR(RunWhole(golden, run));
      break;
    case ParityPath::kChunked:
      RETURN_IF_ERROR(RunChunked(golden, run));
      break;
    case ParityPath::kDecode:
      RETURN_IF_ERROR(RunDecode(golden, run));
      break;
    case ParityPath::kTransfer:
      RETURN_IF_ERROR(RunTransfer(golden, run));
      break;
  }
  return run;
}

absl::Status ParityRunner::RunWhole(const ParityCase& golden, CaseRun& run) {
  ScopedSequence seq(*session_, golden.ids);
  RETURN_IF_ERROR(Compute(*session_, golden, seq.get(), Length(golden), /*absorbed=*/false, run));
  return Generate(*session_, golden, seq.get(), run);
}

absl::Status ParityRunner::RunChunked(const ParityCase& golden, CaseRun& run) {
  const int32_t block_size = session_->block_size();
  const int32_t prefix_tokens = FirstCompared(golden) / block_size * block_size;
  const absl::Span<const int32_t> prefix = absl::MakeConstSpan(golden.ids).first(prefix_tokens);
  const block_hash::BlockHasher hasher(/*hash_seed=*/0);
  const block_hash::BlockHash root = hasher.Root("parity");
  if (prefix_tokens > 0) {
    ScopedSequence first(*session_, prefix);
    first.get().root = root;
    ASSIGN_OR_RETURN(const EngineSession::StepReply reply,
                     session_->Step(first.get(), {.num_tokens = prefix_tokens, .snapshot = true}));
    engine::IndexFullBlocks(first.get(), prefix_tokens, block_size, hasher, session_->pool());
    if (reply.snapshot != engine::kNoSlot) {
      session_->pool().AddSnapshot(reply.snapshot, first.get().hashes.back());
    }
  }
  absl::Status status = [&]() -> absl::Status {
    ScopedSequence scoped(*session_, golden.ids);
    Sequence& seq = scoped.get();
    seq.root = root;
    constexpr auto kComputed = engine::Continuation::kComputed;
    const int32_t cached =
        engine::ReusableBlocks(seq, kComputed, block_size, hasher, session_->pool());
    RETURN_IF_ERROR(engine::TakePrefix(seq, {}, cached, kComputed, block_size, session_->pool()));
    FERRY_CHECK(seq.num_computed == prefix_tokens)
        << "cached " << seq.num_computed << " of " << prefix_tokens;
    while (seq.num_computed < Length(golden)) {
      const int32_t chunk = std::min(kChunkTokens, Length(golden) - seq.num_computed);
      RETURN_IF_ERROR(Compute(*session_, golden, seq, chunk, /*absorbed=*/false, run));
    }
    return Generate(*session_, golden, seq, run);
  }();
  session_->pool().ClearIndex();
  run.note = absl::StrCat(prefix_tokens, " tokens cached");
  return status;
}

absl::Status ParityRunner::RunDecode(const ParityCase& golden, CaseRun& run) {
  ScopedSequence seq(*session_, golden.ids);
  const int32_t prefilled = std::min(kPrefillBeforeDecode, Length(golden) - 1);
  if (prefilled > 0) {
    RETURN_IF_ERROR(Compute(*session_, golden, seq.get(), prefilled, /*absorbed=*/false, run));
  }
  RETURN_IF_ERROR(DecodePrompt(*session_, golden, seq.get(), run));
  run.note = absl::StrCat(prefilled, " tokens prefilled, ", Length(golden) - prefilled, " decoded");
  return Generate(*session_, golden, seq.get(), run);
}

absl::Status ParityRunner::OpenLink() {
  if (link_ != nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(receiver_, EngineSession::Create(engine_options_, num_blocks_));
  ASSIGN_OR_RETURN(link_, CacheLink::Create(session_->engine(), receiver_->engine()));
  return absl::OkStatus();
}

absl::Status ParityRunner::RunTransfer(const ParityCase& golden, CaseRun& run) {
  RETURN_IF_ERROR(OpenLink());
  const int32_t length = Length(golden);
  const int32_t prefilled = FirstCompared(golden) > 0
                                ? FirstCompared(golden)
                                : std::max(1, std::min(kPrefillBeforeDecode, length - 1));
  ScopedSequence source(*session_, golden.ids);
  RETURN_IF_ERROR(Compute(*session_, golden, source.get(), prefilled, /*absorbed=*/false, run));

  ScopedSequence target(*receiver_, golden.ids);
  RETURN_IF_ERROR(engine::TakePrefix(target.get(), {}, /*num_blocks=*/0,
                                     engine::Continuation::kReceived, session_->block_size(),
                                     receiver_->pool()));
  RETURN_IF_ERROR(
      engine::GrowBlocks(target.get(), prefilled, session_->block_size(), receiver_->pool()));
  CacheLink::Pieces<const std::byte> from;
  CacheLink::Pieces<std::byte> to;
  for (const engine::BlockId id : source.get().blocks) from.blocks.push_back(session_->Block(id));
  for (const engine::BlockId id : target.get().blocks) to.blocks.push_back(receiver_->Block(id));
  from.state_slot = session_->StateSlot(source.get().state_slot);
  to.state_slot = receiver_->StateSlot(target.get().state_slot);
  ASSIGN_OR_RETURN(const CacheLink::Report report, link_->Send(from, to));
  target.get().num_computed = prefilled;
  run.note = absl::StrFormat("%d tokens (%d bytes) over %s in %.2f ms", prefilled, report.bytes,
                             link_->link_name(), absl::ToDoubleMilliseconds(report.duration));
  RETURN_IF_ERROR(DecodePrompt(*receiver_, golden, target.get(), run));
  return Generate(*receiver_, golden, target.get(), run);
}

absl::StatusOr<Verdict> RunParity(const ParityOptions& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const model::ModelConfig config, model::LoadModelConfig(options.model_dir));
  const std::string golden_file = options.golden_file.empty()
                                      ? absl::StrCat(options.model_dir, "/golden.safetensors")
                                      : options.golden_file;
  ASSIGN_OR_RETURN(const std::unique_ptr<model::Checkpoint> golden,
                   model::Checkpoint::OpenFile(golden_file));
  ASSIGN_OR_RETURN(const std::vector<ParityCase> cases,
                   ReadParityCases(*golden, config.vocab_size));
  ASSIGN_OR_RETURN(const std::unique_ptr<ParityRunner> runner,
                   ParityRunner::Create(options, cases));
  std::vector<ParityPath> paths = options.paths;
  if (paths.empty()) paths.assign(std::begin(kParityPaths), std::end(kParityPaths));
  std::vector<PathReport> reports;
  for (const ParityPath path : paths) {
    PathReport report{.path = std::string(ParityPathName(path))};
    for (const ParityCase& one : cases) {
      ASSIGN_OR_RETURN(const CaseRun run, runner->Run(path, one));
      report.cases.push_back(CompareCase(one, run));
    }
    out << FormatPath(report) << std::flush;
    reports.push_back(std::move(report));
  }
  const Verdict verdict = Judge(reports, options.max_mean_delta);
  out << verdict.passed << " passed, " << verdict.failed << " failed" << std::endl;
  return verdict;
}

}  // namespace cli
