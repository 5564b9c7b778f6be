// PrefillScheduler: how requests come, are held, pushed, renewed, cancelled, and end.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ferry/v1/worker.pb.h"
#include "prefill_worker/prefill_scheduler.h"
#include "service/process.h"
#include "spdlog/spdlog.h"
#include "status/grpc_status.h"
#include "steady_time/steady_time.h"
#include "tracing/trace_context.h"

namespace prefill_worker {
namespace {

using worker::RequestId;

absl::Status StaleAttempt(const RequestId& id, uint32_t newest) {
  return status::WithReason(absl::FailedPreconditionError(
                                absl::StrCat("attempt ", id.attempt, " of request ", id.request_id,
                                             " is stale, attempt ", newest, " is known")),
                            status::kStaleAttempt);
}

absl::Status Known(const RequestId& id) {
  return absl::AlreadyExistsError(
      absl::StrCat("attempt ", id.attempt, " of request ", id.request_id, " is known"));
}

absl::Status NotHeld(const RequestId& id) {
  return absl::NotFoundError(
      absl::StrCat("no blocks are held for attempt ", id.attempt, " of request ", id.request_id));
}

absl::Status Draining() {
  return status::WithReason(absl::UnavailableError("worker is draining"), status::kDraining);
}

double Ms(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

}  // namespace

void PrefillScheduler::Prefill(std::unique_ptr<Request> request) {
  absl::Status refusal;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (draining_) {
      refusal = Draining();
    } else if (known_.contains(request->id)) {
      metrics_->CountLateEvent("duplicate_prefill");
      refusal = Known(request->id);
    } else if (num_waiting_ >= options_.worker.max_waiting) {
      refusal = status::WithReason(
          absl::ResourceExhaustedError(absl::StrCat(num_waiting_.load(), " requests are waiting")),
          status::kQueueFull);
    } else {
      known_.insert(request->id);
      ++num_requests_;
      ++num_waiting_;
    }
  }
  if (!refusal.ok()) {
    metrics_->CountRequest(refusal);
    return request->sink->End(refusal);
  }
  // std::function wants copyable captures.
  auto shared = std::make_shared<std::unique_ptr<Request>>(std::move(request));
  Post([this, shared] { Accept(std::move(*shared)); });
}

void PrefillScheduler::Accept(std::unique_ptr<Request> request) {
  const RequestId id = request->id;
  if (ending_all_) {
    return Refuse(*request, Draining());
  }
  if (!engine_failure_.ok()) return Refuse(*request, engine_failure_);
  if (const std::optional<uint32_t> ended = ended_.newest(id.request_id); ended >= id.attempt) {
    metrics_->CountLateEvent("late_prefill");
    return Refuse(*request, ended == id.attempt ? Known(id) : StaleAttempt(id, *ended));
  }
  std::vector<Request*> older;
  for (const auto& [other_id, other] : requests_) {
    if (other_id.request_id != id.request_id) continue;
    if (std::max(other_id.attempt, other->send_id.attempt) >= id.attempt) {
      metrics_->CountLateEvent("late_prefill");
      return Refuse(*request, StaleAttempt(id, other_id.attempt));
    }
    older.push_back(other.get());
  }
  // The router has moved on: what an older attempt holds is only in the way.
  for (Request* other : older) End(*other, StaleAttempt(other->id, id.attempt));

  request->sink->Accepted(static_cast<int32_t>(waiting_.size()));
  waiting_.push_back(request.get());
  requests_[id] = std::move(request);
}

void PrefillScheduler::Refuse(const Request& request, const absl::Status& status) {
  --num_waiting_;
  metrics_->CountRequest(status);
  Forget(request.id);
  request.sink->End(status);
}

void PrefillScheduler::Forget(const RequestId& id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  known_.erase(id);
  if (--num_requests_ == 0) emptied_.notify_all();
}

void PrefillScheduler::StartSend(Request& request, const RequestId& id,
                                 const Destination& destination) {
  SendSpec spec;
  spec.id = id;
  spec.traceparent = request.traceparent;
  spec.destination = destination;
  spec.num_tokens = request.num_tokens();
  for (const engine::BlockId block : request.seq.blocks)
    spec.blocks.push_back(runtime_->block(block));
  if (request.seq.state_slot != engine::kNoSlot) {
    spec.state_slot = runtime_->state_slot(request.seq.state_slot);
  }
  request.send_id = id;
  request.receiver = destination.epoch;
  request.send_started = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    known_.insert(id);
  }
  request.send = sender_->Start(std::move(spec), [this, id = request.id](SendResult result) {
    Post([this, id, result = std::move(result)] { OnSendEnd(id, result); });
  });
  if (request.all_sampled()) {
    request.send->Complete(request.first_tokens);
  } else {
    request.send->SetReady(request.num_ready() / runtime_->block_size());
  }
}

void PrefillScheduler::OnSendEnd(const RequestId& id, const SendResult& result) {
  Request* request = Find(id);
  if (request == nullptr) return;
  request->send.reset();
  request->last_result = result;
  if (request->send_id != request->id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    known_.erase(request->send_id);
  }
  if (request->verdict.has_value()) return MaybeFinish(*request);
  if (result.status.ok()) {
    const PrefillSummary summary = Summary(*request, result);
    if (request->push_reply) std::exchange(request->push_reply, nullptr)(summary);
    request->sink->Done(summary);
    return End(*request, absl::OkStatus());
  }
  const absl::Status cause =
      result.no_room ? absl::ResourceExhaustedError(result.status.message()) : result.status;
  // Blocks that were held before stay held: the router may have another place for them.
  if (result.no_room || request->held) return Hold(*request, cause);
  End(*request, cause);
}

PrefillSummary PrefillScheduler::Summary(const Request& request, const SendResult& result) const {
  PrefillSummary summary;
  summary.computed_tokens = request.num_tokens() - request.cached_tokens;
  summary.cached_tokens = request.cached_tokens;
  summary.kv_bytes = result.num_bytes;
  summary.kv_blocks = result.num_blocks;
  summary.kv_groups = result.groups;
  summary.transport = result.link;
  summary.transfer = result.duration;
  summary.queue = request.start_time - request.arrived;
  summary.compute = request.computed_time - request.start_time;
  summary.prefill_ms = request.prefill_ms;
  return summary;
}

void PrefillScheduler::Hold(Request& request, const absl::Status& cause) {
  request.lease_end = steady_time::Now() + options_.worker.kv_lease;
  if (request.push_reply) std::exchange(request.push_reply, nullptr)(cause);
  if (request.held) return;
  request.held = true;
  request.sink->Held(options_.worker.kv_lease, std::string(cause.message()));
  spdlog::info("request_id={} trace_id={} attempt={} held blocks={} cause={}",
               service::LogValue(request.id.request_id), tracing::TraceIdOf(request.traceparent),
               request.id.attempt, request.seq.blocks.size(),
               service::LogValue(std::string(cause.message())));
}

void PrefillScheduler::End(Request& request, absl::Status verdict) {
  if (request.verdict.has_value()) {
    metrics_->CountLateEvent("second_end");
    return;
  }
  request.verdict = std::move(verdict);
  if (!request.admitted && std::erase(waiting_, &request) > 0) --num_waiting_;
  std::erase(computing_, &request);
  if (request.send != nullptr) request.send->Stop(*request.verdict);
  MaybeFinish(request);
}

void PrefillScheduler::MaybeFinish(Request& request) {
  if (request.verdict.has_value() && request.steps_in_flight == 0 && request.send == nullptr) {
    Finish(request);
  }
}

void PrefillScheduler::Finish(Request& request) {
  engine::ReleaseBlocks(request.seq, *runtime_->pool);
  const absl::Status& verdict = *request.verdict;
  metrics_->CountRequest(verdict);
  const absl::Time now = steady_time::Now();
  const SendResult& result = request.last_result;
  spdlog::info(
      "request_id={} trace_id={} attempt={} status={} prompt_tokens={} cached_tokens={} "
      "collected_tokens={} "
      "kv_blocks={} kv_bytes={} link={} queue_ms={:.1f} compute_ms={:.1f} transfer_ms={:.1f} "
      "total_ms={:.1f}{}",
      service::LogValue(request.id.request_id), tracing::TraceIdOf(request.traceparent),
      request.id.attempt, status::CodeName(verdict.code()), request.num_tokens(),
      request.cached_tokens, request.num_collected, result.num_blocks, result.num_bytes,
      service::LogValue(result.link),
      Ms((request.started ? request.start_time : now) - request.arrived),
      Ms(request.started ? std::min(request.computed_time, now) - request.start_time
                         : absl::ZeroDuration()),
      Ms(result.duration), Ms(now - request.arrived),
      verdict.ok() ? ""
                   : absl::StrCat(" cause=", service::LogValue(std::string(verdict.message()))));

  ended_.Add(request.id.request_id, std::max(request.id.attempt, request.send_id.attempt));

  // What the RPC learns last is true: blocks are back and the counts say so.
  const std::unique_ptr<Request> owned = std::move(requests_.find(request.id)->second);
  requests_.erase(owned->id);
  Publish();
  Forget(owned->id);
  if (owned->push_reply) owned->push_reply(verdict);
  owned->sink->End(verdict);
}

void PrefillScheduler::Break(uint64_t stream_id) {
  Post([this, stream_id] {
    for (const auto& [id, request] : requests_) {
      if (request->stream_id != stream_id) continue;
      return End(*request, absl::CancelledError("the router broke the stream"));
    }
  });
}

bool PrefillScheduler::Cancel(const RequestId& id, const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!known_.contains(id)) return false;
  }
  Post([this, id, reason] {
    Request* request = FindByAnyAttempt(id);
    if (request != nullptr) {
      End(*request, absl::CancelledError(absl::StrCat("cancelled: ", reason)));
    }
  });
  return true;
}

void PrefillScheduler::PushHeld(const RequestId& held, uint32_t new_attempt,
                                const Destination& destination, PushReply reply) {
  Post([this, held, new_attempt, destination, reply = std::move(reply)] {
    Request* request = Find(held);
    if (request == nullptr || !request->held || request->verdict.has_value()) {
      metrics_->CountLateEvent("push_held");
      return reply(NotHeld(held));
    }
    if (new_attempt <= request->send_id.attempt) {
      metrics_->CountLateEvent("push_held");
      return reply(new_attempt == request->send_id.attempt && request->push_reply
                       ? Known({held.request_id, new_attempt})
                       : StaleAttempt({held.request_id, new_attempt}, request->send_id.attempt));
    }
    if (request->send != nullptr) {
      return reply(absl::AlreadyExistsError(
          absl::StrCat("the blocks are being pushed under attempt ", request->send_id.attempt)));
    }
    request->push_reply = reply;
    StartSend(*request, {held.request_id, new_attempt}, destination);
  });
}

void PrefillScheduler::CancelPush(const RequestId& held, uint32_t new_attempt) {
  Post([this, held, new_attempt] {
    Request* request = Find(held);
    if (request == nullptr || !request->push_reply || request->send == nullptr ||
        request->send_id.attempt != new_attempt) {
      return;
    }
    request->send->Stop(absl::CancelledError("the router gave the push up"));
  });
}

void PrefillScheduler::RenewLease(const RequestId& held,
                                  std::function<void(absl::StatusOr<absl::Duration>)> reply) {
  Post([this, held, reply = std::move(reply)] {
    Request* request = Find(held);
    if (request == nullptr || !request->held || request->verdict.has_value()) {
      metrics_->CountLateEvent("renew_lease");
      return reply(NotHeld(held));
    }
    request->lease_end = steady_time::Now() + options_.worker.kv_lease;
    reply(options_.worker.kv_lease);
  });
}

void PrefillScheduler::AbortTransfer(AbortCall call, std::function<void(bool)> reply) {
  Post([this, call = std::move(call), reply = std::move(reply)] {
    Request* request = FindByAnyAttempt(call.id);
    const bool other_transfer = request != nullptr && request->send != nullptr &&
                                !call.transfer_id.empty() &&
                                request->send->transfer_id() != call.transfer_id;
    const bool other_peer = request != nullptr && request->receiver.ToBytes() != call.caller_epoch;
    if (request == nullptr || other_transfer || other_peer) {
      metrics_->CountLateEvent("abort_transfer");
      return reply(false);
    }
    if (request->send != nullptr && request->send_id == call.id) {
      return request->send->StopForPeer(call.cause, reply);  // OnSendEnd follows
    }
    if (!request->send_started) {
      End(*request,
          absl::AbortedError(absl::StrCat("the decode worker stopped the transfer: ", call.cause)));
    }
    reply(false);  // no send of this attempt exists, and none will
  });
}

void PrefillScheduler::FillInfo(ferry::v1::WorkerInfo* info) const {
  worker::FillRuntimeInfo(*runtime_, info);
  info->set_role(ferry::v1::WORKER_ROLE_PREFILL);
  info->set_state(draining_ ? ferry::v1::WORKER_STATE_DRAINING : ferry::v1::WORKER_STATE_SERVING);
}

void PrefillScheduler::FillLoad(ferry::v1::LoadReport* report) const {
  report->set_epoch(runtime_->epoch.ToBytes());
  report->set_state(draining_ ? ferry::v1::WORKER_STATE_DRAINING : ferry::v1::WORKER_STATE_SERVING);
  report->set_waiting_requests(num_waiting_);
  const std::lock_guard<std::mutex> lock(mutex_);
  report->set_waiting_tokens(waiting_tokens_);
  report->set_running_requests(running_);
  report->set_step_ms(step_ms_);
  worker::FillBlockCounts(cache_.blocks, report->mutable_kv_blocks());
  worker::FillBlockCounts(cache_.state_slots, report->mutable_state_slots());
}

void PrefillScheduler::StartDrain() { draining_ = true; }

worker::WorkerControl::Remaining PrefillScheduler::remaining() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {.requests = num_requests_ - num_held_,
          .held_blocks = cache_.blocks.held + cache_.blocks.quarantined};
}

PrefillScheduler::Request* PrefillScheduler::Find(const RequestId& id) {
  const auto found = requests_.find(id);
  return found == requests_.end() ? nullptr : found->second.get();
}

PrefillScheduler::Request* PrefillScheduler::FindByAnyAttempt(const RequestId& id) {
  if (Request* request = Find(id); request != nullptr) return request;
  for (const auto& [other, request] : requests_) {
    if (request->send_id == id) return request.get();
  }
  return nullptr;
}

}  // namespace prefill_worker
