#include "cli/cache_link.h"

#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "kv_transfer/outgoing_transfer.h"
#include "kv_transfer/staged_transport.h"
#include "kv_transfer/ucx_transport.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace cli {
namespace {

constexpr absl::Duration kConnectTimeout = absl::Seconds(10);
// Longer than IncomingTransfers' own limits: it speaks first.
constexpr std::chrono::seconds kPatience{120};

// What a callback on another thread will set once.
template <typename T>
struct Promised {
  std::shared_ptr<std::promise<T>> promise = std::make_shared<std::promise<T>>();
  std::future<T> future = promise->get_future();

  absl::StatusOr<T> Wait(const char* what) {
    if (future.wait_for(kPatience) != std::future_status::ready) {
      return absl::DeadlineExceededError(what);
    }
    return future.get();
  }
};

}  // namespace

absl::StatusOr<CacheLink::Side> CacheLink::OpenSide(engine::Engine& engine) {
  Side side;
  side.epoch = kv_transfer::Epoch::Random();
  kv_transfer::UcxOptions options;
  options.epoch = side.epoch;
  options.listen_ip = "127.0.0.1";
  ASSIGN_OR_RETURN(side.transport, kv_transfer::CreateUcxTransport(options));
  ASSIGN_OR_RETURN(side.copies, engine.MakeCopies());
  const engine::CacheSpans cache = engine.cache();
  if (side.copies != nullptr) {
    side.transport =
        kv_transfer::CreateStagedTransport(std::move(side.transport), side.copies.get(),
                                           kv_transfer::kMaxMessageBytes, /*shared=*/nullptr);
  }
  const auto kind =
      side.copies == nullptr ? kv_transfer::MemoryKind::kHost : kv_transfer::MemoryKind::kDevice;
  RETURN_IF_ERROR(side.transport->Register(cache.token_blocks, kind));
  if (!cache.state_slots.empty()) {
    RETURN_IF_ERROR(side.transport->Register(cache.state_slots, kind));
  }
  side.incoming = kv_transfer::CreateIncomingTransfers(side.epoch, side.transport.get());
  return side;
}

CacheLink::CacheLink(Side source, Side target)
    : source_(std::move(source)), target_(std::move(target)) {}

CacheLink::~CacheLink() {
  for (Side* side : {&source_, &target_}) {
    side->transport->Close();  // before the sink goes
    side->incoming.reset();
  }
}

absl::StatusOr<std::unique_ptr<CacheLink>> CacheLink::Create(engine::Engine& source_engine,
                                                             engine::Engine& target_engine) {
  ASSIGN_OR_RETURN(Side source, OpenSide(source_engine));
  absl::StatusOr<Side> target = OpenSide(target_engine);
  if (!target.ok()) {
    source.transport->Close();
    source.incoming.reset();
    return target.status();
  }
  std::unique_ptr<CacheLink> link(new CacheLink(std::move(source), *std::move(target)));
  // Each side may wait for the other.
  absl::Status target_status;
  std::thread connect_target([&] {
    target_status = link->target_.transport->Connect(
        link->source_.epoch, link->source_.transport->addresses(), kConnectTimeout);
  });
  const absl::Status source_status = link->source_.transport->Connect(
      link->target_.epoch, link->target_.transport->addresses(), kConnectTimeout);
  connect_target.join();
  RETURN_IF_ERROR(source_status);
  RETURN_IF_ERROR(target_status);
  return link;
}

absl::StatusOr<CacheLink::Report> CacheLink::Send(const Pieces<const std::byte>& from,
                                                  const Pieces<std::byte>& to) {
  FERRY_CHECK(from.blocks.size() == to.blocks.size())
      << from.blocks.size() << " blocks to " << to.blocks.size();
  const absl::Time begin = absl::Now();
  kv_transfer::IncomingSpec spec;
  spec.transfer_id = kv_transfer::Epoch::Random().bytes;
  spec.sender = source_.epoch;
  spec.blocks = to.blocks;
  spec.state_slot = to.state_slot;
  const kv_transfer::TransferId id = spec.transfer_id;
  Promised<kv_transfer::IncomingResult> arrived;
  RETURN_IF_ERROR(target_.incoming->Expect(
      std::move(spec), [promise = arrived.promise](kv_transfer::IncomingResult result) {
        promise->set_value(std::move(result));
      }));

  Promised<kv_transfer::OutgoingResult> drained;
  const auto outgoing =
      kv_transfer::StartOutgoingTransfer(source_.transport.get(), target_.epoch, id, 0);
  for (size_t i = 0; i < from.blocks.size(); ++i) {
    outgoing->SendBlock(static_cast<uint32_t>(i), from.blocks[i]);
  }
  if (!from.state_slot.empty()) outgoing->SendStateSlot(from.state_slot);
  outgoing->Finish([promise = drained.promise](kv_transfer::OutgoingResult result) {
    promise->set_value(std::move(result));
  });
  ASSIGN_OR_RETURN(const kv_transfer::OutgoingResult sent, drained.Wait("sends did not complete"));
  RETURN_IF_ERROR(sent.status);
  RETURN_IF_ERROR(target_.incoming->Announce(id, sent.blocks, sent.bytes));
  ASSIGN_OR_RETURN(const kv_transfer::IncomingResult received,
                   arrived.Wait("receives did not complete"));
  RETURN_IF_ERROR(received.status);
  return Report{.bytes = received.bytes, .duration = absl::Now() - begin};
}

std::string CacheLink::link_name() const { return source_.transport->LinkName(target_.epoch); }

}  // namespace cli
