#include "router/front_door.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ferry/v1/inference.pb.h"
#include "router/admission.h"
#include "service/process.h"
#include "status/grpc_status.h"
#include "status/status_macros.h"

namespace router {
namespace {

constexpr size_t kMaxWaitingTexts = 1024;

}  // namespace

FrontDoor::FrontDoor(Router* router)
    : router_(router),
      pool_(std::max(1, static_cast<int>(std::thread::hardware_concurrency() / 2)),
            kMaxWaitingTexts) {}

absl::Status FrontDoor::Run(size_t num_bytes, std::function<void()> work) {
  if (num_bytes < kInlineTokenizeBytes) {
    work();
    return absl::OkStatus();
  }
  if (pool_.Submit(std::move(work))) return absl::OkStatus();
  return status::WithReason(
      absl::ResourceExhaustedError(absl::StrCat(kMaxWaitingTexts, " long texts wait to be read")),
      status::kQueueFull);
}

absl::Status FrontDoor::Check(const ferry::v1::GenerateRequest& request) const {
  if (router_->draining()) {
    return status::WithReason(absl::UnavailableError("the router is draining"), status::kDraining);
  }
  return CheckParameters(request, router_->models());
}

void FrontDoor::Enter(std::vector<Entry> entries) {
  absl::Status status = Check(*entries.front().request);
  size_t num_bytes = 0;
  size_t index = 0;
  for (; status.ok() && index < entries.size(); ++index) {
    status = CheckRequest(*entries[index].request, router_->models());
    num_bytes += entries[index].request->text().size();
    if (!status.ok()) break;
  }
  if (status.ok()) {
    index = 0;
    status = Run(num_bytes, [this, entries] { PrepareAll(entries); });
  }
  if (!status.ok()) RefuseAll(entries, index, status);
}

absl::StatusOr<PreparedRequest> FrontDoor::Prepare(const Entry& entry) const {
  if (entry.client->gone()) return absl::CancelledError("the client has gone");
  const Arrival& arrival = entry.arrival;
  ASSIGN_OR_RETURN(PreparedRequest prepared,
                   PrepareRequest(*entry.request, router_->models(), arrival.text));
  prepared.arrival = arrival.time;
  prepared.deadline = arrival.deadline;
  prepared.trace = arrival.trace;
  router_->metrics()->ObserveStage("tokenize", EventLoop::Now() - arrival.time);
  return prepared;
}

void FrontDoor::PrepareAll(const std::vector<Entry>& entries) {
  std::vector<PreparedRequest> prepared;
  const auto call = entries.size() == 1 ? nullptr : std::make_shared<RequestCall>();
  if (call != nullptr) call->num_requests = static_cast<int64_t>(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    absl::StatusOr<PreparedRequest> one = Prepare(entries[i]);
    if (!one.ok()) {
      RefuseAll(entries, i, one.status());
      return;
    }
    if (call != nullptr) call->num_bytes += one->bytes;
    one->call = call;
    prepared.push_back(*std::move(one));
  }
  router_->loop()->Post([this, entries, prepared = std::move(prepared)]() mutable {
    // A refusal is the call's: it is logged and counted once.
    size_t i = 0;
    while (i < entries.size() && Submit(entries[i], std::move(prepared[i]))) ++i;
    for (++i; i < entries.size(); ++i) Cancel(entries[i]);
  });
}

bool FrontDoor::Submit(const Entry& entry, PreparedRequest prepared) {
  const auto& [arrival, request, client] = entry;
  const absl::Status status = client->gone()
                                  ? absl::CancelledError("the client has gone")
                                  : router_->Submit(arrival.number, std::move(prepared), client);
  if (status.ok()) return router_->IsOpen(arrival.number);
  Refuse(arrival, request->request_id(), status, client);
  return false;
}

void FrontDoor::Cancel(const Entry& entry) {
  router_->loop()->Post([client = entry.client] {
    client->Finish(absl::CancelledError("another request of the call was refused"));
  });
}

void FrontDoor::RefuseAll(const std::vector<Entry>& entries, size_t index,
                          const absl::Status& status) {
  const Entry& first = entries[index];
  Refuse(first.arrival, first.request->request_id(), status, first.client);
  for (const Entry& entry : entries) {
    if (&entry != &first) Cancel(entry);
  }
}

void FrontDoor::NoteRefusal(const Arrival& arrival, const std::string& request_id,
                            const absl::Status& status) {
  spdlog::info("request_id={} trace_id={} status={} phase=new cause={}",
               request_id.empty() ? "-" : service::LogValue(request_id), arrival.trace.trace_id,
               status::CodeName(status.code()), service::LogValue(std::string(status.message())));
  router_->metrics()->CountRejected(status::CodeName(status.code()));
}

void FrontDoor::Refuse(const Arrival& arrival, const std::string& request_id,
                       const absl::Status& status, std::shared_ptr<ClientStream> client) {
  NoteRefusal(arrival, request_id, status);
  router_->loop()->Post([client = std::move(client), status] { client->Finish(status); });
}

}  // namespace router
