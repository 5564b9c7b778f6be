#include "tests/chaos/stage.h"

#include <signal.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace chaos {
namespace {

using integration::FerrySystem;
using integration::SystemOptions;
using integration::WorkerProcess;

// A slow machine included.
constexpr absl::Duration kReadyLimit = absl::Seconds(60);

void Append(std::vector<std::string>* to, const std::vector<std::string>& what) {
  to->insert(to->end(), what.begin(), what.end());
}

}  // namespace

Stage::Stage(const StageOptions& options) {
  SystemOptions system;
  system.model_dir = options.model_dir;
  system.num_prefill = options.num_prefill;
  system.num_decode = options.num_decode;
  const std::vector<std::string> worker_flags = {"--links",
                                                 options.links,
                                                 "--num_threads",
                                                 "1",
                                                 "--chunk_stall_s",
                                                 "2",
                                                 "--reserve_wait_s",
                                                 "1",
                                                 "--handshake_timeout_s",
                                                 "3",
                                                 "--kv_lease_s",
                                                 "5",
                                                 "--quarantine_max_s",
                                                 "5"};
  system.prefill_flags = system.decode_flags = worker_flags;
  system.router_flags = {
      "--heartbeat_s",        "0.5",
      "--stream_idle_s",      "6",
      "--default_deadline_s", absl::StrCat(absl::ToInt64Seconds(kRouterDeadline))};
  // The last one of a flag would be refused as a repetition, so these are the caller's alone.
  Append(&system.prefill_flags, options.prefill_flags);
  Append(&system.decode_flags, options.decode_flags);
  Append(&system.router_flags, options.router_flags);
  system.site = [this, wrap = options.wrap, meddle = options.meddle](const std::string& name) {
    integration::Site site =
        OwnNetwork().SiteOf(name, wrap == nullptr ? std::vector<std::string>() : wrap(name));
    const bool meddled = meddle && absl::StartsWith(name, "decode");
    site.front = [this, name, meddled](const std::string& address) {
      std::unique_ptr<Relay>& relay = relays_[address];
      if (relay == nullptr) relay = std::make_unique<Relay>(OwnNetwork().hub_ip(name), address);
      if (!meddled) return relay->address();
      std::unique_ptr<Meddler>& meddler = meddlers_[address];
      if (meddler == nullptr) {
        meddler = Meddler::Start(OwnNetwork().hub_ip(name), relay->address());
      }
      return meddler->address();
    };
    return site;
  };
  system_ = FerrySystem::Start(system);
  observer_ = std::make_unique<Observer>(system_->router_address());
}

Stage::~Stage() {
  Calm();
  // What the observer has not been asked about is judged here.
  for (const std::string& fault : observer_->Take().faults_found) ADD_FAILURE() << fault;
}

int64_t Stage::num_repeated() const {
  int64_t sum = 0;
  for (const auto& [address, meddler] : meddlers_) sum += meddler->num_repeated();
  return sum;
}

void Stage::BeClient(const std::vector<Question>& questions, uint64_t seed) {
  std::mt19937_64 random(seed);
  while (busy_) {
    Manner manner;
    switch (random() % 8) {
      case 0:
        manner.leaves_after = static_cast<int>(random() % 4);
        break;
      case 1:
        manner.deadline = absl::Milliseconds(1 + random() % 300);
        manner.may_run_out = true;
        break;
      case 2:
        manner.deadline = kRouterDeadline;
        manner.deadline_is_routers = true;
        manner.may_run_out = true;
        break;
    }
    const Outcome outcome = observer_->Ask(questions[random() % questions.size()], manner);
    if (absl::IsUnavailable(outcome.status)) observer_->WaitForRouter(absl::Seconds(1));
  }
}

void Stage::Busy(const std::vector<Question>& questions, int num_clients, uint64_t seed) {
  busy_ = true;
  for (int c = 0; c < num_clients; ++c) {
    clients_.emplace_back([this, &questions, seed = seed * 1000 + static_cast<uint64_t>(c)] {
      BeClient(questions, seed);
    });
  }
}

void Stage::Calm() {
  busy_ = false;
  for (std::thread& client : clients_) client.join();
  clients_.clear();
}

void Stage::Let(int64_t ends, absl::Duration limit) { observer_->WaitForEnds(ends, limit); }

std::string Stage::Repair() {
  network().Heal();
  for (WorkerProcess* worker : system_->Living()) {
    worker->process.Signal(SIGCONT);
    relay(*worker).SetDelay(absl::ZeroDuration());
    relay(*worker).SetSilent(false);
  }
  return system_->WaitUntilReady(kReadyLimit);
}

void Stage::AskAll(const std::vector<Question>& questions) {
  for (const Question& question : questions) {
    const Outcome outcome = observer_->Ask(question, {});
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  }
}

}  // namespace chaos
