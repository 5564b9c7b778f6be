#include "tests/fakes/fake_worker.h"

#include <atomic>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/fakes/fake_worker_services.h"

namespace fakes {
namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(20);
constexpr auto kPatience = std::chrono::seconds(20);

std::string NewEpoch() {
  static std::atomic<int> count{0};
  std::string epoch = absl::StrCat("epoch-", ++count);
  epoch.resize(16, '.');
  return epoch;
}

}  // namespace

void DecodeCall::Accept() {
  DecodeEvent event;
  event.mutable_accepted();
  Push(event);
}

void DecodeCall::Tokens(uint32_t branch, const std::string& bytes, FinishReason finish) {
  DecodeEvent event;
  DecodeTokens* tokens = event.mutable_tokens();
  tokens->set_branch(branch);
  for (const char c : bytes) {
    tokens->add_token_ids(static_cast<uint8_t>(c));
    if (request.spec().sampling().num_logprobs() < 0) continue;
    PositionLogprobs* position = tokens->add_logprobs();
    position->mutable_chosen()->set_token_id(static_cast<uint8_t>(c));
    position->mutable_chosen()->set_logprob(-0.5f);
    for (int i = 0; i < request.spec().sampling().num_logprobs(); ++i) {
      position->add_top()->set_token_id('A' + i);
    }
  }
  tokens->set_finish_reason(finish);
  Push(event);
}

void DecodeCall::Done(uint32_t cached_tokens) {
  DecodeEvent event;
  event.mutable_done()->set_cached_tokens(cached_tokens);
  Push(event);
}

void DecodeCall::Answer(const std::string& bytes, FinishReason finish) {
  for (uint32_t branch = 0; branch < request.spec().sampling().n(); ++branch) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      Tokens(branch, bytes.substr(i, 1),
             i + 1 == bytes.size() ? finish : FINISH_REASON_UNSPECIFIED);
    }
  }
  Done();
  End(absl::OkStatus());
}

void PrefillCall::Accept() {
  PrefillEvent event;
  event.mutable_accepted();
  Push(event);
}
void PrefillCall::Started() {
  PrefillEvent event;
  event.mutable_started();
  Push(event);
}
void PrefillCall::Held(absl::Duration lease) {
  PrefillEvent event;
  event.mutable_held()->set_lease_ms(absl::ToInt64Milliseconds(lease));
  event.mutable_held()->set_cause("no room");
  Push(event);
}
void PrefillCall::Done(double prefill_ms) {
  PrefillEvent event;
  PrefillDone* done = event.mutable_done();
  done->set_computed_tokens(request.spec().token_ids_size());
  done->set_kv_bytes(1000);
  done->set_kv_blocks(2);
  done->set_transport("fake");
  done->set_transfer_ms(1.5);
  done->set_prefill_ms(prefill_ms);
  Push(event);
}

FakeWorker::FakeWorker(const Options& options, Directory* directory)
    : options_(options), directory_(directory), epoch_(NewEpoch()) {
  services_ = std::make_unique<Services>(this);
  services_->Start(options.port);
  port_ = services_->port();
  address_ = absl::StrCat("127.0.0.1:", port_);
  (*directory_)[address_] = this;
}

FakeWorker::~FakeWorker() { Kill(); }
void FakeWorker::Kill() { services_->Stop(); }

void FakeWorker::DefaultDecode(const std::shared_ptr<DecodeCall>& call) {
  call->Accept();
  if (call->request.local_prefill()) {
    call->Answer(output);
    return;
  }
  std::lock_guard lock(services_->mutex_);
  services_->open_decodes_[KeyText(call->request.spec().key())] = call;
}

void FakeWorker::DefaultPrefill(const std::shared_ptr<PrefillCall>& call) {
  call->Accept();
  call->Started();
  FakeWorker* const decode = directory_->at(call->request.decode().address());
  if (!decode->Deliver(call->request.spec().key())) {
    call->End(absl::AbortedError("no decode is open for the request"));
    return;
  }
  call->Done(slowness * 1e3 * call->request.spec().token_ids_size() / kPrefillTokensPerSecond);
  call->End(absl::OkStatus());
}

bool FakeWorker::Deliver(const RequestKey& key) {
  std::shared_ptr<DecodeCall> call;
  {
    std::lock_guard lock(services_->mutex_);
    const auto it = services_->open_decodes_.find(KeyText(key));
    if (it == services_->open_decodes_.end()) return false;
    call = it->second;
    services_->open_decodes_.erase(it);
  }
  call->Answer(output);
  return true;
}

void FakeWorker::SetLoad(uint64_t waiting_tokens, uint32_t running, uint32_t used_blocks) {
  std::lock_guard lock(services_->mutex_);
  services_->load_.set_waiting_tokens(waiting_tokens);
  services_->load_.set_running_requests(running);
  services_->load_.mutable_kv_blocks()->set_active(used_blocks);
  services_->ReportAll();
}

void FakeWorker::SetState(WorkerState state) {
  std::lock_guard lock(services_->mutex_);
  services_->load_.set_state(state);
  services_->ReportAll();
}

void FakeWorker::PauseReports(bool paused) {
  std::lock_guard lock(services_->mutex_);
  services_->paused_ = paused;
}

void FakeWorker::Store(const std::vector<block_hash::BlockHash>& chain) {
  std::lock_guard lock(services_->mutex_);
  KvEventFrame frame;
  frame.set_epoch(epoch_);
  frame.set_seq(++services_->last_seq_);
  for (const auto& hash : chain) {
    KvEvent event;
    event.mutable_stored()->set_hash(std::string(hash.view()));
    *frame.add_events() = event;
    services_->stored_.push_back(event);
  }
  services_->frames_.push_back(frame);
  services_->DropBrokenWatches();
  for (auto& watch : services_->kv_streams_) {
    if (std::exchange(services_->skip_next_, false)) watch.sent = frame.seq();
    services_->SendKv(&watch);
  }
}

void FakeWorker::SkipFrame() {
  std::lock_guard lock(services_->mutex_);
  services_->skip_next_ = true;
}

void FakeWorker::ForgetLog() {
  std::lock_guard lock(services_->mutex_);
  services_->frames_.clear();
  services_->first_kept_ = services_->last_seq_;
}

std::vector<DecodeRequest> FakeWorker::decodes() const {
  std::lock_guard lock(services_->mutex_);
  return services_->decodes_;
}
std::vector<PrefillRequest> FakeWorker::prefills() const {
  std::lock_guard lock(services_->mutex_);
  return services_->prefills_;
}
std::vector<absl::Duration> FakeWorker::cancel_limits() const {
  std::lock_guard lock(services_->mutex_);
  return services_->cancel_limits_;
}

std::vector<RequestKey> FakeWorker::cancels() const {
  std::lock_guard lock(services_->mutex_);
  return services_->cancels_;
}
std::vector<PushHeldRequest> FakeWorker::pushes() const {
  std::lock_guard lock(services_->mutex_);
  return services_->pushes_;
}
int FakeWorker::num_renewals() const {
  std::lock_guard lock(services_->mutex_);
  return services_->renewals_;
}
int FakeWorker::num_broken() const {
  std::lock_guard lock(services_->mutex_);
  return services_->broken_;
}
std::vector<uint64_t> FakeWorker::kv_watch_starts() const {
  std::lock_guard lock(services_->mutex_);
  return services_->kv_starts_;
}

void FakeWorker::Heard() { services_->changed_.notify_all(); }

bool FakeWorker::WaitFor(const std::function<bool()>& condition) const {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    std::unique_lock lock(services_->mutex_);
    // The condition may be about another worker: look again at every tick as well.
    services_->changed_.wait_for(lock, kLookAgain);
    if (std::chrono::steady_clock::now() > end) return false;
  }
  return true;
}

}  // namespace fakes
