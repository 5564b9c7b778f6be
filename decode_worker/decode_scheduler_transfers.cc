// The scheduler's half of a transfer: reserve, receive, commit; release, abort, fail.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "decode_worker/decode_scheduler.h"
#include "engine/plan_builder.h"
#include "spdlog/spdlog.h"
#include "status/check.h"
#include "status/grpc_status.h"

namespace decode_worker {
namespace {

// P states how long it can wait; no more than this is believed.
constexpr absl::Duration kMaxReserveWait = absl::Minutes(1);

std::string Name(const worker::RequestId& id) {
  return absl::StrCat("request ", id.request_id, " attempt ", id.attempt);
}

absl::Status CheckFirstTokens(const std::vector<FirstToken>& tokens, int32_t num_branches,
                              int32_t vocab_size) {
  if (static_cast<int32_t>(tokens.size()) != num_branches) {
    return absl::InvalidArgumentError(
        absl::StrCat(tokens.size(), " first tokens for ", num_branches, " branches"));
  }
  for (int32_t i = 0; i < num_branches; ++i) {
    if (tokens[i].branch != i) {
      return absl::InvalidArgumentError(
          absl::StrCat("first token of branch ", tokens[i].branch, " where branch ", i, " is due"));
    }
    if (tokens[i].sample.token_id < 0 || tokens[i].sample.token_id >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("first token ", tokens[i].sample.token_id,
                                                     ", the vocabulary has ", vocab_size));
    }
  }
  return absl::OkStatus();
}

}  // namespace

void DecodeScheduler::Reserve(ReserveCall call,
                              std::function<void(absl::StatusOr<ReserveGrant>)> done) {
  if (!inbox_.Post([this, call, done] { DoReserve(call, done); })) {
    done(absl::UnavailableError("the worker stops"));
  }
}

void DecodeScheduler::ConfirmTransfer(ConfirmCall call, std::function<void(absl::Status)> done) {
  auto shared = std::make_shared<ConfirmCall>(std::move(call));
  if (!inbox_.Post([this, shared, done] { DoConfirm(std::move(*shared), done); })) {
    done(absl::UnavailableError("the worker stops"));
  }
}

void DecodeScheduler::ReleaseTransfer(TransferRef ref, std::function<void(absl::Status)> done) {
  if (!inbox_.Post([this, ref, done] { DoRelease(ref, done); })) {
    done(absl::UnavailableError("the worker stops"));
  }
}

void DecodeScheduler::AbortTransfer(TransferRef ref, std::string cause,
                                    std::function<void(bool landed)> done) {
  // When the inbox is closed the transport closes too, and every request has ended.
  if (!inbox_.Post([this, ref, cause, done] { DoAbort(ref, cause, done); })) done(false);
}

absl::StatusOr<DecodeScheduler::Request*> DecodeScheduler::Find(const worker::RequestId& id) {
  const auto it = by_id_.find(id.request_id);
  if (it == by_id_.end() || it->second->spec.id.attempt < id.attempt) {
    metrics_->CountLateEvent("unknown_request");
    return absl::NotFoundError(absl::StrCat("no decode is open for ", Name(id)));
  }
  if (it->second->spec.id.attempt > id.attempt) {
    metrics_->CountLateEvent("stale_attempt");
    return status::WithReason(
        absl::FailedPreconditionError(
            absl::StrCat(Name(id), " is stale, attempt ", it->second->spec.id.attempt, " is open")),
        status::kStaleAttempt);
  }
  return it->second;
}

void DecodeScheduler::DoReserve(ReserveCall call,
                                std::function<void(absl::StatusOr<ReserveGrant>)> done) {
  const absl::StatusOr<Request*> found = Find(call.request);
  if (!found.ok()) return done(found.status());
  Request& request = **found;
  const int32_t num_tokens = static_cast<int32_t>(request.spec.tokens.size());
  if (request.spec.local_prefill) {
    return done(absl::InvalidArgumentError(
        absl::StrCat(Name(call.request), " is prefilled here, nothing can be reserved for it")));
  }
  if (request.phase != Phase::kWaitReserve) {
    return done(absl::AlreadyExistsError(absl::StrCat(Name(call.request), " is reserved already")));
  }
  if (call.num_tokens != num_tokens) {
    return done(absl::InvalidArgumentError(
        absl::StrCat(Name(call.request), " has ", num_tokens, " tokens, not ", call.num_tokens)));
  }
  if (call.sender != request.spec.prefill_epoch) {
    return done(status::WithReason(
        absl::FailedPreconditionError(absl::StrCat(Name(call.request), " expects sender ",
                                                   request.spec.prefill_epoch.ToHex(), ", not ",
                                                   call.sender.ToHex())),
        status::kStaleEpoch));
  }
  if (runtime_->transport->LinkName(call.sender).empty()) {
    return done(absl::UnavailableError(
        absl::StrCat("no link to sender ", call.sender.ToHex(), ": handshake first")));
  }
  request.phase = Phase::kReserving;
  request.sender = call.sender;
  request.reserve_done = std::move(done);
  const absl::Duration wait = std::clamp(call.wait, absl::ZeroDuration(), kMaxReserveWait);
  request.reserve_until = Clock::now() + absl::ToChronoNanoseconds(wait);
  Enqueue(*request.branches[0]);
  AdmitQueued();  // so that a call that does not wait is answered from what is free now
}

void DecodeScheduler::GrantReservation(Request& request, Branch& trunk,
                                       std::vector<engine::BlockId> fresh) {
  const Clock::time_point now = Clock::now();
  absl::Duration total = options_.worker.transfer_total;
  if (request.spec.deadline != Clock::time_point::max()) {
    // A little longer than the request lives, so that its end is told as what it is.
    total = std::min(total, absl::FromChrono(request.spec.deadline - now) + absl::Seconds(1));
  }
  ReserveGrant grant{.transfer_id = {},
                     .cached_tokens = trunk.seq.num_computed,
                     .num_blocks = static_cast<int32_t>(fresh.size()),
                     .state_slot = trunk.seq.state_slot != engine::kNoSlot};
  grant.transfer_id =
      receiver_.Open(request.serial, request.spec.id, request.sender, std::move(fresh),
                     std::exchange(trunk.seq.state_slot, engine::kNoSlot), total);
  request.phase = Phase::kReceiving;
  request.transfer_id = grant.transfer_id;
  request.usage.cached_tokens = grant.cached_tokens;
  std::exchange(request.reserve_done, nullptr)(grant);
}

void DecodeScheduler::DoConfirm(ConfirmCall call, std::function<void(absl::Status)> done) {
  const absl::StatusOr<Request*> found = Find(call.request);
  if (!found.ok()) return done(found.status());
  Request& request = **found;
  const bool known = request.transfer_id == call.transfer_id && request.sender == call.sender;
  if (known && request.phase == Phase::kRunning) return done(absl::OkStatus());  // told twice
  if (!known || request.phase != Phase::kReceiving) {
    return done(absl::NotFoundError(absl::StrCat(Name(call.request), " has no such transfer")));
  }
  if (request.confirm_done != nullptr) {
    return done(absl::AlreadyExistsError(
        absl::StrCat(Name(call.request), ": the transfer is being confirmed")));
  }
  if (const absl::Status checked =
          CheckFirstTokens(call.first_tokens, request.spec.num_branches,
                           runtime_->engine->network().config().vocab_size);
      !checked.ok()) {
    metrics_->CountTransferFailure(checked);
    done(checked);
    return EndRequest(request,
                      absl::AbortedError(absl::StrCat("prefill worker ", call.sender.ToHex(), ": ",
                                                      std::string(checked.message()))));
  }
  request.confirm_done = std::move(done);
  request.first_tokens = std::move(call.first_tokens);
  // Whether it is right or wrong, the transfer's end follows and answers.
  receiver_.Announce(call.transfer_id, call.num_blocks, call.num_bytes).IgnoreError();
}

void DecodeScheduler::DoRelease(TransferRef ref, std::function<void(absl::Status)> done) {
  const absl::StatusOr<Request*> found = Find(ref.request);
  if (!found.ok()) return done(found.status());
  Request& request = **found;
  if (request.phase != Phase::kReceiving || request.sender != ref.sender ||
      (ref.transfer_id.has_value() && *ref.transfer_id != request.transfer_id)) {
    return done(absl::NotFoundError(absl::StrCat(Name(ref.request), " has no such transfer")));
  }
  receiver_.Abandon(request.transfer_id, absl::CancelledError("released by the sender"));
  ReturnToWaitReserve(request);
  done(absl::OkStatus());
}

void DecodeScheduler::DoAbort(TransferRef ref, std::string cause, std::function<void(bool)> done) {
  const absl::StatusOr<Request*> found = Find(ref.request);
  // A request whose blocks are confirmed needs its sender no more, and what another sender or an
  // older transfer gives up is not this one's.
  if (found.ok() && (*found)->phase != Phase::kRunning && !(*found)->spec.local_prefill &&
      (*found)->spec.prefill_epoch == ref.sender &&
      (!ref.transfer_id.has_value() || *ref.transfer_id == (*found)->transfer_id)) {
    Request& request = **found;
    if (request.phase == Phase::kReceiving) {
      const absl::Status aborted =
          absl::AbortedError(absl::StrCat("aborted by the sender: ", cause));
      metrics_->CountTransferFailure(aborted);
      receiver_.Abandon(request.transfer_id, aborted);
      ReturnToWaitReserve(request);  // so that its end does not tell the sender
    }
    EndRequest(request, absl::AbortedError(absl::StrCat("aborted by prefill worker ",
                                                        ref.sender.ToHex(), ": ", cause)));
  }
  receiver_.OnDrained(ref, std::move(done));
}

void DecodeScheduler::ReturnToWaitReserve(Request& request) {
  Branch& trunk = *request.branches[0];
  queue_.erase({trunk.serial, trunk.index});
  admission_.Leave(trunk);
  for (Branch* fork : trunk.forks) admission_.Leave(*fork);
  DropBlocks(trunk, *runtime_->pool);  // the prefix; the destination is the receiver's
  request.phase = Phase::kWaitReserve;
  request.usage.cached_tokens = 0;
}

void DecodeScheduler::OnTransferEnd(KvReceiver::End end) {
  // Not abandoned, so its request is there and waits for it.
  Request& request = *requests_.at(end.owner);
  FERRY_CHECK(request.phase == Phase::kReceiving && request.transfer_id == end.id)
      << "phase=" << static_cast<int>(request.phase);
  request.usage.kv_bytes_received = end.result.bytes;
  if (end.result.status.ok()) {
    metrics_->ObserveTransfer(
        end.result.first_to_last, end.result.bytes,
        runtime_->engine->cache_layout().BytesOf(request.usage.cached_tokens,
                                                 static_cast<int64_t>(request.spec.tokens.size()),
                                                 end.state_slot != engine::kNoSlot));
    return Commit(request, std::move(end.blocks), end.state_slot);
  }
  metrics_->CountTransferFailure(end.result.status);
  const absl::Status failure =
      absl::AbortedError(absl::StrCat("transfer from prefill worker ", request.sender.ToHex(), ": ",
                                      std::string(end.result.status.message())));
  if (request.confirm_done != nullptr) std::exchange(request.confirm_done, nullptr)(failure);
  ReturnToWaitReserve(request);  // the blocks have gone already
  EndRequest(request, failure);
}

void DecodeScheduler::Commit(Request& request, std::vector<engine::BlockId> blocks,
                             engine::SlotId state_slot) {
  Branch& trunk = *request.branches[0];
  engine::Sequence& seq = trunk.seq;
  const int32_t num_tokens = static_cast<int32_t>(seq.tokens.size());
  seq.blocks.insert(seq.blocks.end(), blocks.begin(), blocks.end());
  seq.state_slot = state_slot;
  request.phase = Phase::kRunning;
  seq.num_computed = num_tokens;
  engine::IndexFullBlocks(seq, num_tokens, runtime_->block_size(), *runtime_->hasher,
                          *runtime_->pool);
  metrics_->CountPromptTokens(0, request.usage.cached_tokens,
                              num_tokens - request.usage.cached_tokens);
  request.usage.wait_ms =
      std::chrono::duration<double, std::milli>(Clock::now() - request.accepted_at).count();
  std::exchange(request.confirm_done, nullptr)(absl::OkStatus());

  std::vector<Branch*> branches = ForkBranches(trunk, runtime_->block_size(), *runtime_->pool);
  branches.insert(branches.begin(), &trunk);
  const std::vector<FirstToken> first_tokens = std::move(request.first_tokens);
  for (size_t i = 0; i < branches.size(); ++i) {
    branches[i]->seq.tokens.push_back(first_tokens[i].sample.token_id);
    runner_.Start(*branches[i], BranchState::kDecoding);
  }
  // A first token may be the last one, and the last branch's last token ends the request.
  const uint64_t serial = request.serial;
  for (size_t i = 0; i < branches.size() && requests_.contains(serial); ++i) {
    OnSample(*branches[i], first_tokens[i].sample);
  }
}

}  // namespace decode_worker
