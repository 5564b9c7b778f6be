#include "decode_worker/kv_receiver.h"

#include <memory>
#include <utility>

#include "status/check.h"

namespace decode_worker {

KvReceiver::KvReceiver(const worker::WorkerRuntime* runtime,
                       kv_transfer::IncomingTransfers* incoming, const Options& options,
                       std::function<void(std::function<void()>)> post,
                       std::function<void(End)> on_end)
    : runtime_(runtime),
      incoming_(incoming),
      options_(options),
      post_(std::move(post)),
      on_end_(std::move(on_end)) {}

KvReceiver::TransferId KvReceiver::Open(uint64_t owner, const worker::RequestId& request,
                                        const kv_transfer::Epoch& sender,
                                        std::vector<engine::BlockId> blocks,
                                        engine::SlotId state_slot, absl::Duration total_timeout) {
  // Random, so that a message of an earlier transfer can never be taken for one of this.
  const TransferId id = kv_transfer::Epoch::Random().bytes;
  kv_transfer::IncomingSpec spec{.transfer_id = id,
                                 .attempt = request.attempt,
                                 .sender = sender,
                                 .blocks = {},
                                 .state_slot = {},
                                 .stall_timeout = options_.stall_timeout,
                                 .total_timeout = total_timeout};
  spec.blocks.reserve(blocks.size());
  for (const engine::BlockId block : blocks) spec.blocks.push_back(runtime_->block(block));
  if (state_slot != engine::kNoSlot) spec.state_slot = runtime_->state_slot(state_slot);
  Transfer& transfer = transfers_[id];
  transfer = {.owner = owner,
              .request = request,
              .sender = sender,
              .blocks = std::move(blocks),
              .state_slot = state_slot,
              .abandoned = false,
              .on_drained = {}};
  Add(transfer, 1, reserved_);
  const absl::Status expected =
      incoming_->Expect(std::move(spec), [this, id](kv_transfer::IncomingResult result) {
        // On the transport's thread.
        auto shared = std::make_shared<kv_transfer::IncomingResult>(std::move(result));
        post_([this, id, shared] { Ended(id, std::move(*shared)); });
      });
  FERRY_CHECK(expected.ok()) << expected.ToString();
  return id;
}

absl::Status KvReceiver::Announce(const TransferId& id, int32_t num_blocks, uint64_t num_bytes) {
  return incoming_->Announce(id, num_blocks, num_bytes);
}

void KvReceiver::Abandon(const TransferId& id, const absl::Status& cause) {
  const auto it = transfers_.find(id);
  FERRY_CHECK(it != transfers_.end() && !it->second.abandoned) << "transfer is not open";
  it->second.abandoned = true;
  Add(it->second, -1, reserved_);
  Add(it->second, 1, quarantined_);
  // False: it has just ended, and its end is in the inbox.
  incoming_->Abort(id, cause, options_.abandon_grace);
}

void KvReceiver::OnDrained(const TransferRef& ref, std::function<void(bool)> done) {
  // Every transfer found reports once; the last report is the answer.
  struct Pending {
    int32_t left = 0;
    bool landed = false;
    std::function<void(bool)> done;
  };
  auto pending = std::make_shared<Pending>();
  pending->done = std::move(done);
  for (auto& [transfer_id, transfer] : transfers_) {
    if (transfer.request != ref.request || transfer.sender != ref.sender ||
        transfer_id != ref.transfer_id.value_or(transfer_id)) {
      continue;
    }
    ++pending->left;
    transfer.on_drained.push_back([pending](bool landed) {
      pending->landed |= landed;
      if (--pending->left == 0) pending->done(pending->landed);
    });
  }
  if (pending->left == 0) pending->done(false);
}

void KvReceiver::AnswerWaiters() {
  for (auto& [id, transfer] : transfers_) {
    for (const auto& done : std::exchange(transfer.on_drained, {})) done(true);
  }
}

void KvReceiver::Add(const Transfer& transfer, int32_t sign, Counts& counts) {
  counts.blocks += sign * static_cast<int32_t>(transfer.blocks.size());
  if (transfer.state_slot != engine::kNoSlot) counts.state_slots += sign;
}

void KvReceiver::Ended(const TransferId& id, kv_transfer::IncomingResult result) {
  const auto it = transfers_.find(id);
  FERRY_CHECK(it != transfers_.end()) << "a transfer ends once";
  Transfer transfer = std::move(it->second);
  transfers_.erase(it);
  Add(transfer, -1, transfer.abandoned ? quarantined_ : reserved_);
  const bool landed = result.bytes > 0;
  if (transfer.abandoned || !result.status.ok()) {
    runtime_->pool->Release(transfer.blocks);
    transfer.blocks.clear();
    if (transfer.state_slot != engine::kNoSlot) {
      runtime_->pool->state_slots()->Release(std::exchange(transfer.state_slot, engine::kNoSlot));
    }
  }
  if (!transfer.abandoned) {
    on_end_({.owner = transfer.owner,
             .id = id,
             .result = std::move(result),
             .blocks = std::move(transfer.blocks),
             .state_slot = transfer.state_slot});
  }
  for (const auto& done : transfer.on_drained) done(landed);
}

}  // namespace decode_worker
