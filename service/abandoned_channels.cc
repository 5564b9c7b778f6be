#include "service/abandoned_channels.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "grpcpp/grpcpp.h"

namespace service {
namespace {

// Between two attempts a channel pauses for at least kFirstReconnectMs of grpc_server.cc: half of
// that finds every pause.
constexpr std::chrono::milliseconds kLook{50};

bool IsConnecting(grpc::Channel& channel) {
  return channel.GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_CONNECTING;
}

// Lives as long as the process: whoever lets go of a channel may be one of gRPC's own threads.
class Keeper {
 public:
  static Keeper& Get() {
    static Keeper* const keeper = new Keeper;
    return *keeper;
  }

  void Keep(std::shared_ptr<grpc::Channel> channel) {
    const std::lock_guard lock(mutex_);
    channels_.push_back(std::move(channel));
    changed_.notify_all();
  }

 private:
  Keeper() {
    std::thread([this] { Run(); }).detach();
  }

  void Run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !channels_.empty(); });
      std::vector<std::shared_ptr<grpc::Channel>> kept = std::exchange(channels_, {});
      lock.unlock();
      std::erase_if(kept, [](const auto& channel) { return !IsConnecting(*channel); });
      lock.lock();
      channels_.insert(channels_.end(), kept.begin(), kept.end());
      kept.clear();
      if (!channels_.empty()) changed_.wait_for(lock, kLook);
    }
  }

  std::mutex mutex_;  // guards channels_
  std::condition_variable changed_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
};

}  // namespace

std::shared_ptr<grpc::Channel> EndedWhenConnected(std::shared_ptr<grpc::Channel> channel) {
  grpc::Channel* const raw = channel.get();
  return {raw, [channel = std::move(channel)](grpc::Channel*) mutable {
            if (IsConnecting(*channel)) Keeper::Get().Keep(std::move(channel));
            channel.reset();
          }};
}

}  // namespace service
