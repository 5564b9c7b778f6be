#include "router/front_door.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ferry/v1/inference.pb.h"
#include "service/process.h"
#include "status/grpc_status.h"

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

void FrontDoor::Enter(const Arrival& arrival,
                      std::shared_ptr<const ferry::v1::GenerateRequest> request,
                      std::shared_ptr<ClientStream> client) {
  absl::Status status =
      router_->draining()
          ? status::WithReason(absl::UnavailableError("the router is draining"), status::kDraining)
          : CheckRequest(*request, router_->models());
  if (status.ok()) {
    status = Run(request->text().size(),
                 [this, arrival, request, client] { Prepare(arrival, *request, client); });
  }
  if (!status.ok()) Refuse(arrival, request->request_id(), status, std::move(client));
}

void FrontDoor::Prepare(const Arrival& arrival, const ferry::v1::GenerateRequest& request,
                        std::shared_ptr<ClientStream> client) {
  absl::StatusOr<PreparedRequest> prepared =
      PrepareRequest(request, router_->models(), arrival.text);
  if (!prepared.ok()) {
    Refuse(arrival, request.request_id(), prepared.status(), std::move(client));
    return;
  }
  prepared->arrival = arrival.time;
  prepared->deadline = arrival.deadline;
  prepared->trace = arrival.trace;
  router_->metrics()->ObserveStage("tokenize", EventLoop::Now() - arrival.time);
  router_->loop()->Post([this, arrival, client = std::move(client),
                         submitted = std::move(*prepared)]() mutable {
    const std::string request_id = submitted.request_id;
    const absl::Status status = client->gone()
                                    ? absl::CancelledError("the client has gone")
                                    : router_->Submit(arrival.number, std::move(submitted), client);
    if (!status.ok()) Refuse(arrival, request_id, status, std::move(client));
  });
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
