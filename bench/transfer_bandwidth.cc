// transfer_bandwidth: how fast blocks move between two processes over Ferry's transport.
//
//   transfer_bandwidth --kind=tcp --block_bytes=1990656 --pool_bytes=1990656
//   --total_bytes=4000000000
//
// Starts itself a second time as the sender.  `pool_bytes` is the memory that the blocks cycle
// through on each side: one block is always the same, warm memory, a pool above the caches is what
// a cache is.  Prints one line: GB/s as the receiver sees it, from the end of the warm-up (kWarmUp
// blocks, as `ucx_perftest -w`) to the last receive, and its parameters.

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <mutex>

#include "absl/strings/escaping.h"
#include "status/check.h"
#include "tests/kv_transfer/ucx_of_test.h"

namespace {

using kv_transfer::Epoch;
using kv_transfer::LinkAddress;
using kv_transfer::MessageHeader;
using kv_transfer::TestMemory;
using Clock = std::chrono::steady_clock;

constexpr int64_t kWarmUp = 20;  // blocks

struct Options {
  std::string kind = "tcp";
  std::string path;  // tests/kv_transfer/ucx_of_test.h
  int64_t block_bytes = 64 * 27 * 1152;
  int64_t pool_bytes = 0;  // 0: one block
  int64_t total_bytes = int64_t{4} << 30;
  bool sender = false;
};

// Memory as a worker has it: huge pages, touched once, or a device's.
absl::Span<std::byte> MakePool(const Options& options, int64_t bytes) {
  if (!options.path.empty()) {
    static const std::unique_ptr<kernels::Buffer> buffer = TestMemory::Get().Allocate(bytes);
    return {buffer->data(), static_cast<size_t>(bytes)};
  }
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  FERRY_CHECK(memory != MAP_FAILED) << "mapping " << bytes << " bytes";
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, bytes);
  return {static_cast<std::byte*>(memory), static_cast<size_t>(bytes)};
}

int64_t PoolBlocks(const Options& options) {
  return std::max<int64_t>(1, options.pool_bytes / options.block_bytes);
}

// Accepts everything and takes the time of what arrives.
class Meter final : public kv_transfer::ReceiveSink {
 public:
  Meter(absl::Span<std::byte> pool, int64_t block_bytes, int64_t messages)
      : pool_(pool), block_bytes_(block_bytes), messages_(messages) {}

  absl::StatusOr<absl::Span<std::byte>> OnOffer(const Epoch&,
                                                const MessageHeader& header) override {
    return pool_.subspan((header.index * block_bytes_) % pool_.size(), block_bytes_);
  }
  void OnReceived(const Epoch&, const MessageHeader&, absl::Status status) override {
    FERRY_CHECK(status.ok()) << status;
    const Clock::time_point now = Clock::now();
    std::lock_guard lock(mutex_);
    if (++received_ == kWarmUp) first_ = now;
    last_ = now;
    if (received_ == messages_) changed_.notify_all();  // once: a woken thread takes a core
  }
  void OnPeerLost(const Epoch&, absl::Status cause) override {
    if (!done_) std::cerr << "peer lost: " << cause << "\n";
  }
  double WaitForSeconds() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return received_ == messages_; });
    done_ = true;
    return std::chrono::duration<double>(last_ - first_).count();
  }

 private:
  const absl::Span<std::byte> pool_;
  const int64_t block_bytes_;
  const int64_t messages_;
  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  int64_t received_ = 0;
  Clock::time_point first_;
  Clock::time_point last_;
  std::atomic<bool> done_{false};
};

std::string Hex(const std::string& s) { return s.empty() ? "-" : absl::BytesToHexString(s); }
std::string Unhex(const std::string& s) { return s == "-" ? "" : absl::HexStringToBytes(s); }

struct Peer {
  Epoch epoch;
  LinkAddress address;
};

void Print(std::ostream& out, const Epoch& epoch, const LinkAddress& address) {
  out << Hex(epoch.ToBytes()) << " " << Hex(address.host_id) << " " << Hex(address.worker_address)
      << " " << Hex(address.listener) << " " << Hex(address.slots) << std::endl;
}

Peer ReadPeer(std::istream& in, const std::string& kind) {
  std::string epoch_hex, host_id, worker_address, listener, slots;
  in >> epoch_hex >> host_id >> worker_address >> listener >> slots;
  return {.epoch = *Epoch::FromBytes(Unhex(epoch_hex)),
          .address = {.kind = kind,
                      .host_id = Unhex(host_id),
                      .worker_address = Unhex(worker_address),
                      .listener = Unhex(listener),
                      .slots = Unhex(slots)}};
}

// Of the sender, to whom nobody sends.
class Nothing final : public kv_transfer::ReceiveSink {
 public:
  absl::StatusOr<absl::Span<std::byte>> OnOffer(const Epoch&, const MessageHeader&) override {
    return absl::FailedPreconditionError("the sender receives nothing");
  }
  void OnReceived(const Epoch&, const MessageHeader&, absl::Status) override {}
  void OnPeerLost(const Epoch&, absl::Status) override {}
};

std::unique_ptr<kv_transfer::Transport> MakeTransport(const Options& options, const Epoch& epoch) {
  static const std::unique_ptr<kernels::DeviceCopies> copies = TestMemory::Get().MakeCopies();
  auto transport =
      kv_transfer::MakeUcx(options.kind + options.path, epoch, copies.get(),
                           {.num_shared = kv_transfer::kSharedSlots, .bytes = options.block_bytes});
  FERRY_CHECK(transport.ok()) << transport.status();
  return *std::move(transport);
}

// Reads the receiver's address from stdin, writes its own to stdout, and sends until everything is
// gone, as soon as the receiver has connected too.
int RunSender(const Options& options) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto [receiver, address] = ReadPeer(std::cin, options.kind);
  const absl::Span<std::byte> pool = MakePool(options, PoolBlocks(options) * options.block_bytes);
  Nothing nothing;
  const Epoch epoch = Epoch::Random();
  const auto transport = MakeTransport(options, epoch);
  transport->SetSink(&nothing);
  const absl::Status status = transport->Connect(receiver, {address}, absl::Seconds(10));
  FERRY_CHECK(status.ok()) << status;
  Print(std::cout, epoch, transport->addresses().front());
  std::string word;
  std::cin >> word;
  const int64_t messages = kWarmUp + options.total_bytes / options.block_bytes;
  std::mutex mutex;  // guards in_flight
  std::condition_variable changed;
  int64_t in_flight = 0;
  for (int64_t i = 0; i < messages; ++i) {
    std::unique_lock lock(mutex);
    // Refilled in batches, for the same reason.
    if (in_flight == 4 * kv_transfer::kSendWindow) {
      changed.wait(lock, [&] { return in_flight <= 2 * kv_transfer::kSendWindow; });
    }
    ++in_flight;
    lock.unlock();
    MessageHeader header;
    header.receiver_epoch = receiver;
    header.index = static_cast<uint32_t>(i);
    header.length = options.block_bytes;
    const size_t offset = (i * options.block_bytes) % pool.size();
    transport->Send(receiver, header, pool.subspan(offset, options.block_bytes),
                    [&](absl::Status sent) {
                      FERRY_CHECK(sent.ok()) << sent;
                      std::lock_guard relock(mutex);
                      --in_flight;
                      if (in_flight == 2 * kv_transfer::kSendWindow || in_flight == 0) {
                        changed.notify_all();
                      }
                    });
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return in_flight == 0; });
  lock.unlock();
  std::cin >> word;  // the receiver has everything
  return 0;
}

int RunReceiver(const Options& options, char** argv) {
  const absl::Span<std::byte> pool = MakePool(options, PoolBlocks(options) * options.block_bytes);
  const int64_t messages = options.total_bytes / options.block_bytes;
  Meter meter(pool, options.block_bytes, kWarmUp + messages);
  const Epoch epoch = Epoch::Random();
  const auto transport = MakeTransport(options, epoch);
  transport->SetSink(&meter);

  int in[2], out[2];
  FERRY_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0) << "pipe";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], 0);
  posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  std::vector<std::string> words = {argv[0],
                                    "--sender",
                                    "--kind=" + options.kind,
                                    "--block_bytes=" + std::to_string(options.block_bytes),
                                    "--pool_bytes=" + std::to_string(options.pool_bytes),
                                    "--total_bytes=" + std::to_string(options.total_bytes)};
  if (!options.path.empty()) words.push_back("--path=" + options.path);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t pid = 0;
  FERRY_CHECK(posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, arguments.data(), environ) ==
              0)
      << "starting the sender";
  posix_spawn_file_actions_destroy(&actions);
  std::ostringstream line;
  Print(line, epoch, transport->addresses().front());
  FERRY_CHECK(write(in[1], line.str().data(), line.str().size()) > 0) << "telling the sender";
  close(out[1]);
  std::string told;
  for (char c = 0; c != '\n' && read(out[0], &c, 1) == 1;) told += c;
  std::istringstream words_of_sender(told);
  const auto [sender, address] = ReadPeer(words_of_sender, options.kind);
  const absl::Status connected = transport->Connect(sender, {address}, absl::Seconds(10));
  FERRY_CHECK(connected.ok()) << connected;
  FERRY_CHECK(write(in[1], "go\n", 3) == 3) << "telling the sender";

  const double seconds = meter.WaitForSeconds();
  close(in[1]);  // the sender's stdin ends
  waitpid(pid, nullptr, 0);
  rusage own{}, child{};
  getrusage(RUSAGE_SELF, &own);
  getrusage(RUSAGE_CHILDREN, &child);
  const auto cpu = [](const rusage& u) {
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec +
           1e-6 * static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
  };
  const double gigabytes = 1e-9 * static_cast<double>(messages * options.block_bytes);
  std::printf(
      "%.3f GB/s  kind=%s%s block_bytes=%ld pool_bytes=%ld  cpu s/GB: receiver %.3f sender %.3f\n",
      gigabytes / seconds, options.kind.c_str(), options.path.c_str(), options.block_bytes,
      PoolBlocks(options) * options.block_bytes, cpu(own) / gigabytes, cpu(child) / gigabytes);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("measures Ferry's transport between two processes");
  app.add_option("--kind", options.kind, "shm, tcp or rc");
  app.add_option(
         "--path", options.path,
         "of a GPU's memory (FERRY_TEST_MEMORY=cuda): _staged, or with shm _shared or _device")
      ->check(CLI::IsMember({"_staged", "_shared", "_device"}));
  app.add_option("--block_bytes", options.block_bytes)->check(CLI::Range(1, 8 << 20));
  app.add_option("--pool_bytes", options.pool_bytes, "0: one block, reused");
  app.add_option("--total_bytes", options.total_bytes);
  app.add_flag("--sender", options.sender, "set by the program itself");
  CLI11_PARSE(app, argc, argv);
  return options.sender ? RunSender(options) : RunReceiver(options, argv);
}
