// Somebody who says wrong things to the workers: repeated, out of order, of other epochs, attempts
// and transfers.  Each gets its refusal, real requests go on beside it and get their text, and no
// block is lost.

#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ferry/v1/kv_transfer.grpc.pb.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "status/grpc_status.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"

namespace integration {
namespace {

using grpc::StatusCode;

constexpr auto kCallTimeout = std::chrono::seconds(10);

class HostilePeerTest : public testing::Test {
 protected:
  void SetUp() override {
    model_ = std::getenv("FERRY_DEMO_MODEL");
    SystemOptions options;
    options.model_dir = model_;
    options.prefill_flags = {"--num_blocks", "100", "--num_threads", "1"};
    options.decode_flags = {"--num_blocks", "100", "--num_threads", "1"};
    options.router_flags = {"--local_prefill_tokens", "0"};
    system_ = FerrySystem::Start(options);
    for (WorkerProcess* worker : {&system_->prefill(0), &system_->decode(0)}) {
      const auto channel = grpc::CreateChannel(worker->address, grpc::InsecureChannelCredentials());
      transfer_.push_back(ferry::v1::KvTransfer::NewStub(channel));
      prefill_.push_back(ferry::v1::PrefillWorker::NewStub(channel));
      decode_.push_back(ferry::v1::DecodeWorker::NewStub(channel));
      ferry::v1::WorkerInfo info;
      grpc::ClientContext context;
      ASSERT_TRUE(worker->stub->GetInfo(&context, {}, &info).ok());
      epochs_.push_back(info.epoch());
      model_name_ = info.model();
    }
  }

  // A unary call; its status.
  template <typename Stub, typename Request, typename Response>
  static grpc::Status Call(Stub& stub,
                           grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                        Response*),
                           const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
    return (stub.*method)(&context, request, response);
  }
  using TransferStub = ferry::v1::KvTransfer::Stub;
  grpc::Status Reserve(const ferry::v1::ReserveRequest& request) {
    ferry::v1::ReserveResponse response;
    return Call(*transfer_[kDecode], &TransferStub::Reserve, request, &response);
  }
  grpc::Status Confirm(const ferry::v1::TransferDoneRequest& request) {
    ferry::v1::TransferDoneResponse response;
    return Call(*transfer_[kDecode], &TransferStub::TransferDone, request, &response);
  }
  grpc::Status Release(const ferry::v1::ReleaseRequest& request) {
    ferry::v1::ReleaseResponse response;
    return Call(*transfer_[kDecode], &TransferStub::Release, request, &response);
  }
  grpc::Status Abort(int worker, const ferry::v1::AbortTransferRequest& request,
                     ferry::v1::AbortTransferResponse* response) {
    return Call(*transfer_[worker], &TransferStub::AbortTransfer, request, response);
  }
  grpc::Status PushHeld(const ferry::v1::PushHeldRequest& request) {
    ferry::v1::PushHeldResponse response;
    return Call(*prefill_[kPrefill], &ferry::v1::PrefillWorker::Stub::PushHeld, request, &response);
  }
  grpc::Status RenewLease(const ferry::v1::RenewLeaseRequest& request) {
    ferry::v1::RenewLeaseResponse response;
    return Call(*prefill_[kPrefill], &ferry::v1::PrefillWorker::Stub::RenewLease, request,
                &response);
  }

  ferry::v1::RequestSpec Spec(const std::string& id, uint32_t attempt, int num_tokens) const {
    ferry::v1::RequestSpec spec;
    spec.mutable_key()->set_request_id(id);
    spec.mutable_key()->set_attempt(attempt);
    for (int i = 0; i < num_tokens; ++i) spec.add_token_ids(20 + i % 100);
    spec.set_num_prompt_tokens(num_tokens);
    ferry::v1::ResolvedSampling& sampling = *spec.mutable_sampling();
    sampling.set_top_p(1);
    sampling.set_repetition_penalty(1);
    sampling.set_max_tokens(8);
    sampling.set_n(1);
    sampling.set_num_logprobs(-1);
    spec.set_deadline_ms(60000);
    spec.set_model(model_name_);
    return spec;
  }
  // Opens Decode and waits until it is accepted.
  struct OpenDecode {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<ferry::v1::DecodeEvent>> stream;
  };
  std::unique_ptr<OpenDecode> Open(const ferry::v1::RequestSpec& spec,
                                   const std::string& prefill_epoch) {
    ferry::v1::DecodeRequest request;
    *request.mutable_spec() = spec;
    request.set_worker_epoch(epochs_[kDecode]);
    request.mutable_prefill()->set_address(system_->prefill(0).address);
    request.mutable_prefill()->set_epoch(prefill_epoch);
    auto open = std::make_unique<OpenDecode>();
    open->stream = decode_[kDecode]->Decode(&open->context, request);
    ferry::v1::DecodeEvent event;
    EXPECT_TRUE(open->stream->Read(&event) && event.has_accepted());
    return open;
  }
  void ExpectOneRightAnswer() {
    const Ask ask = {MakePrompt(300, 5, 400), 12, 3};
    SingleEngine oracle(model_);
    const auto completion = system_->client().Complete(ToRequest(ask));
    ASSERT_TRUE(completion.ok()) << completion.status();
    EXPECT_EQ(Tokens(*completion), Expected(oracle, ask));
  }

  enum { kPrefill, kDecode };  // index into the next four
  std::vector<std::unique_ptr<TransferStub>> transfer_;
  std::vector<std::unique_ptr<ferry::v1::PrefillWorker::Stub>> prefill_;
  std::vector<std::unique_ptr<ferry::v1::DecodeWorker::Stub>> decode_;
  std::vector<std::string> epochs_;
  std::string model_;
  std::string model_name_;
  std::unique_ptr<FerrySystem> system_;
};

TEST_F(HostilePeerTest, TransferCallsOutOfOrderAreRefusedInWords) {
  const std::string other_epoch(16, 'e');
  const std::string other_id(16, 't');
  ferry::v1::ReserveRequest reserve;
  reserve.mutable_key()->set_request_id("r");
  reserve.mutable_key()->set_attempt(2);
  reserve.set_sender_epoch(epochs_[kPrefill]);
  reserve.set_receiver_epoch(epochs_[kDecode]);
  reserve.set_num_tokens(100);
  ferry::v1::TransferDoneRequest confirm;
  *confirm.mutable_key() = reserve.key();
  confirm.set_transfer_id(other_id);
  confirm.set_sender_epoch(epochs_[kPrefill]);
  confirm.set_receiver_epoch(epochs_[kDecode]);
  confirm.set_num_blocks(2);
  ferry::v1::ReleaseRequest release;
  *release.mutable_key() = reserve.key();
  release.set_transfer_id(other_id);
  release.set_sender_epoch(epochs_[kPrefill]);
  ferry::v1::AbortTransferRequest abort;
  *abort.mutable_key() = reserve.key();
  abort.set_transfer_id(other_id);
  abort.set_caller_epoch(other_epoch);
  ferry::v1::AbortTransferResponse aborted;

  // Nobody has opened Decode.
  EXPECT_EQ(Reserve(reserve).error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(Confirm(confirm).error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(Release(release).error_code(), StatusCode::NOT_FOUND);
  for (const int worker : {kPrefill, kDecode}) {
    EXPECT_TRUE(Abort(worker, abort, &aborted).ok());
    EXPECT_EQ(aborted.writer_state(), ferry::v1::WRITER_STATE_NEVER_STARTED);
  }

  // Decode is open, nothing is reserved.
  const auto open = Open(Spec("r", 2, 100), epochs_[kPrefill]);
  EXPECT_EQ(Confirm(confirm).error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(Release(release).error_code(), StatusCode::NOT_FOUND);
  EXPECT_TRUE(Abort(kDecode, abort, &aborted).ok());
  ferry::v1::ReserveRequest wrong = reserve;
  wrong.set_num_tokens(99);
  EXPECT_EQ(Reserve(wrong).error_code(), StatusCode::INVALID_ARGUMENT);
  wrong = reserve;
  wrong.set_sender_epoch(other_epoch);
  EXPECT_EQ(status::Reason(status::FromGrpc(Reserve(wrong))), status::kStaleEpoch);
  wrong = reserve;
  wrong.set_receiver_epoch(other_epoch);
  EXPECT_EQ(status::Reason(status::FromGrpc(Reserve(wrong))), status::kStaleEpoch);
  wrong = reserve;
  wrong.mutable_key()->set_attempt(1);
  EXPECT_EQ(status::Reason(status::FromGrpc(Reserve(wrong))), status::kStaleAttempt);
  wrong = reserve;
  wrong.set_sender_epoch("short");
  EXPECT_EQ(Reserve(wrong).error_code(), StatusCode::INVALID_ARGUMENT);
  confirm.set_transfer_id("short");
  EXPECT_EQ(Confirm(confirm).error_code(), StatusCode::INVALID_ARGUMENT);

  // The prefill worker itself is asked for things that nobody began.
  ferry::v1::PushHeldRequest push;
  push.set_request_id("r");
  push.set_attempt_held(1);
  push.set_attempt(2);
  push.mutable_decode()->set_address(system_->decode(0).address);
  push.mutable_decode()->set_epoch(epochs_[kDecode]);
  push.set_worker_epoch(epochs_[kPrefill]);
  EXPECT_EQ(PushHeld(push).error_code(), StatusCode::NOT_FOUND);
  ferry::v1::RenewLeaseRequest renew;
  renew.mutable_key()->set_request_id("r");
  renew.set_worker_epoch(epochs_[kPrefill]);
  EXPECT_EQ(RenewLease(renew).error_code(), StatusCode::NOT_FOUND);
  renew.set_worker_epoch(other_epoch);
  EXPECT_EQ(status::Reason(status::FromGrpc(RenewLease(renew))), status::kStaleEpoch);

  open->context.TryCancel();
  ExpectOneRightAnswer();
  EXPECT_EQ(system_->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_F(HostilePeerTest, TheSameRequestTwiceIsKnownAndRunsOnce) {
  ferry::v1::DecodeRequest decode;
  *decode.mutable_spec() = Spec("twice", 1, 100);
  decode.set_worker_epoch(epochs_[kDecode]);
  decode.set_local_prefill(true);
  decode.mutable_spec()->mutable_sampling()->set_max_tokens(800);
  grpc::ClientContext first_context, second_context;
  auto first = decode_[kDecode]->Decode(&first_context, decode);
  ferry::v1::DecodeEvent event;
  ASSERT_TRUE(first->Read(&event) && event.has_accepted());
  auto second = decode_[kDecode]->Decode(&second_context, decode);
  EXPECT_FALSE(second->Read(&event));
  EXPECT_EQ(second->Finish().error_code(), StatusCode::ALREADY_EXISTS);
  int num_tokens = 0;
  bool done = false;
  while (first->Read(&event)) {
    num_tokens += event.tokens().token_ids_size();
    done = event.has_done();
  }
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_EQ(num_tokens, 800);
  EXPECT_TRUE(done);

  // At the prefill worker, with a destination that has restarted since.
  ferry::v1::PrefillRequest prefill;
  *prefill.mutable_spec() = Spec("once", 1, 100);
  prefill.set_worker_epoch(epochs_[kPrefill]);
  prefill.mutable_decode()->set_address(system_->decode(0).address);
  prefill.mutable_decode()->set_epoch(std::string(16, 'e'));
  for (const bool again : {false, true}) {
    grpc::ClientContext context;
    auto stream = prefill_[kPrefill]->Prefill(&context, prefill);
    ferry::v1::PrefillEvent message;
    while (stream->Read(&message)) {
    }
    const absl::Status status = status::FromGrpc(stream->Finish());
    if (again) {
      EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
    } else {
      EXPECT_EQ(status::Reason(status), status::kStaleEpoch) << status;
    }
  }
  ExpectOneRightAnswer();
  EXPECT_EQ(system_->WaitUntilIdle(absl::Seconds(20)), "");
}

// Random calls, half right and half wrong in every field, while real requests run.
TEST_F(HostilePeerTest, ANoisyStrangerDisturbsNobody) {
  SingleEngine oracle(model_);
  const int32_t vocab = oracle.engine().network().config().vocab_size;
  std::vector<Ask> asks;
  std::vector<std::vector<int32_t>> expected;
  for (uint32_t i = 0; i < 8; ++i) {
    asks.push_back({MakePrompt(100 + 60 * static_cast<int32_t>(i), i, vocab), 40, i});
    expected.push_back(Expected(oracle, asks.back()));
  }
  std::atomic<bool> over = false;
  std::vector<std::thread> strangers;
  for (uint32_t s = 0; s < 3; ++s) {
    strangers.emplace_back([&, s] {
      std::mt19937 random(s);
      const auto pick = [&](const std::string& a, const std::string& b) {
        return random() % 2 == 0 ? a : b;
      };
      const auto epoch = [&] {
        return pick(pick(epochs_[kPrefill], epochs_[kDecode]), std::string(random() % 18, 'e'));
      };
      const auto fill_key = [&](ferry::v1::RequestKey* key) {
        key->set_request_id(absl::StrCat("noise", random() % 3));
        key->set_attempt(random() % 4);
      };
      const auto transfer_id = [&] {
        return std::string(random() % 2 == 0 ? 16 : random() % 18, 't');
      };
      ferry::v1::AbortTransferResponse aborted;
      for (int call = 0; call < 400 && !over; ++call) {
        std::unique_ptr<OpenDecode> open;
        if (call % 20 == 0) {
          ferry::v1::DecodeRequest request;
          *request.mutable_spec() =
              Spec(absl::StrCat("noise", random() % 3), 1 + random() % 3, 100);
          request.set_worker_epoch(epoch());
          request.mutable_prefill()->set_address(system_->prefill(0).address);
          request.mutable_prefill()->set_epoch(epoch());
          open = std::make_unique<OpenDecode>();
          open->stream = decode_[kDecode]->Decode(&open->context, request);
          ferry::v1::DecodeEvent event;
          open->stream->Read(&event);
        }
        switch (random() % 6) {
          case 0: {
            ferry::v1::ReserveRequest request;
            fill_key(request.mutable_key());
            request.set_sender_epoch(epoch());
            request.set_receiver_epoch(epoch());
            request.set_num_tokens(pick("1", "2") == "1" ? 100 : random());
            request.set_wait_ms(random() % 50);
            Reserve(request);
            break;
          }
          case 1: {
            ferry::v1::TransferDoneRequest request;
            fill_key(request.mutable_key());
            request.set_transfer_id(transfer_id());
            request.set_sender_epoch(epoch());
            request.set_receiver_epoch(epoch());
            request.set_num_blocks(random());
            request.set_num_bytes(random());
            request.add_first_tokens()->set_token_id(random());
            Confirm(request);
            break;
          }
          case 2: {
            ferry::v1::ReleaseRequest request;
            fill_key(request.mutable_key());
            if (random() % 2 == 0) request.set_transfer_id(transfer_id());
            request.set_sender_epoch(epoch());
            Release(request);
            break;
          }
          case 3: {
            ferry::v1::AbortTransferRequest request;
            fill_key(request.mutable_key());
            if (random() % 2 == 0) request.set_transfer_id(transfer_id());
            request.set_caller_epoch(epoch());
            Abort(random() % 2 == 0 ? kPrefill : kDecode, request, &aborted);
            break;
          }
          case 4: {
            ferry::v1::PushHeldRequest request;
            request.set_request_id(absl::StrCat("noise", random() % 3));
            request.set_attempt_held(random() % 4);
            request.set_attempt(random() % 4);
            request.mutable_decode()->set_address(pick(system_->decode(0).address, "nowhere:1"));
            request.mutable_decode()->set_epoch(epoch());
            request.set_worker_epoch(epoch());
            PushHeld(request);
            break;
          }
          default: {
            ferry::v1::RenewLeaseRequest request;
            fill_key(request.mutable_key());
            request.set_worker_epoch(epoch());
            RenewLease(request);
          }
        }
        if (open != nullptr) {
          open->context.TryCancel();
          open->stream->Finish();
        }
      }
    });
  }
  for (int round = 0; round < 4; ++round) {
    for (size_t i = 0; i < asks.size(); ++i) {
      const auto completion = system_->client().Complete(ToRequest(asks[i]));
      ASSERT_TRUE(completion.ok()) << completion.status();
      EXPECT_EQ(Tokens(*completion), expected[i]);
      EXPECT_EQ(completion->summary.attempts(), 1);
    }
  }
  over = true;
  for (std::thread& stranger : strangers) stranger.join();
  EXPECT_EQ(system_->WaitUntilIdle(absl::Seconds(20)), "");
}

}  // namespace
}  // namespace integration
