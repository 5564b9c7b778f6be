// PrefillCall: a Prefill RPC as the router sees it.

#ifndef TESTS_PREFILL_WORKER_PREFILL_CALL_H_
#define TESTS_PREFILL_WORKER_PREFILL_CALL_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "ferry/v1/worker.grpc.pb.h"
#include "service/trace_metadata.h"
#include "status/grpc_status.h"

namespace prefill_worker {

class PrefillCall {
 public:
  PrefillCall(ferry::v1::PrefillWorker::Stub* stub, const ferry::v1::PrefillRequest& request,
              const std::string& traceparent = "") {
    service::AddTraceparent(traceparent, &context_);
    reader_ = stub->Prefill(&context_, request);
  }

  // The next event; nothing set at the end.
  ferry::v1::PrefillEvent Next() {
    ferry::v1::PrefillEvent event;
    if (!reader_->Read(&event)) event.Clear();
    return event;
  }
  // Reads until an event of this kind.
  ferry::v1::PrefillEvent Until(ferry::v1::PrefillEvent::EventCase kind) {
    ferry::v1::PrefillEvent event = Next();
    while (event.event_case() != kind && event.event_case() != 0) event = Next();
    EXPECT_EQ(event.event_case(), kind);
    return event;
  }
  absl::Status Finish() {
    while (Next().event_case() != 0) {
    }
    return status::FromGrpc(reader_->Finish());
  }
  void Cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<ferry::v1::PrefillEvent>> reader_;
};

}  // namespace prefill_worker

#endif  // TESTS_PREFILL_WORKER_PREFILL_CALL_H_
