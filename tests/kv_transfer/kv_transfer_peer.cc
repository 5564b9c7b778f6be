// The other process of peer_process_test: a transport driven by lines on stdin, answering on
// stdout.
//
//   address                        -> address EPOCH KIND HOST_ID WORKER_ADDRESS LISTENER SLOTS
//   connect EPOCH KIND ...         -> connect CODE
//   prepare ID BLOCKS BYTES SEED   -> prepared: the memory is filled
//   send ID BLOCKS BYTES SEED      -> sending, and later: sent CODE NUM_BLOCKS; prepared or not
//   expect ID BLOCKS BYTES SEED    -> expecting, and later: ended CODE NUM_BLOCKS
//   announce ID BLOCKS BYTES       -> announce CODE
//   fence EPOCH                    -> fence CODE
//   tear SIGNAL EPOCH KIND ...     -> tear OK, if it lives so long: it sends itself the signal in
//                                     the middle of a message (torn_message.h)
//
// Byte strings are in hex, "-" is empty, CODE is a canonical status code.

#include <signal.h>
#include <sys/prctl.h>

#include <iostream>
#include <map>
#include <sstream>

#include "tests/kv_transfer/peer_process.h"
#include "tests/kv_transfer/side.h"
#include "tests/kv_transfer/torn_message.h"
#include "tests/kv_transfer/ucx_of_test.h"

namespace kv_transfer {
namespace {

std::mutex output_mutex;  // guards std::cout: lines come from several threads

void Answer(const std::string& line) {
  std::lock_guard lock(output_mutex);
  std::cout << line << std::endl;
}

struct Job {
  std::unique_ptr<Blocks> blocks;
  std::shared_ptr<OutgoingTransfer> outgoing;
};

int Main(const std::string& name) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that dies takes its peers along
  const Epoch epoch = Epoch::Random();
  const std::unique_ptr<kernels::DeviceCopies> copies = TestMemory::Get().MakeCopies();
  auto transport = MakeUcx(name, epoch, copies.get());
  if (!transport.ok()) {
    Answer(std::string(transport.status().message()));
    return 1;
  }
  std::map<TransferId, Job> jobs;  // keeps the memory until the transport is closed
  Side side(epoch, *std::move(transport));
  Epoch peer;

  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    if (command == "address") {
      Answer("address " + FormatAddress(side.epoch, side.transport->addresses().front()));
    } else if (command == "connect") {
      const auto [epoch, address] = ParseAddress(words);
      peer = epoch;
      const absl::Status status = side.transport->Connect(epoch, {address}, absl::Seconds(10));
      Answer("connect " + std::string(absl::StatusCodeToString(status.code())));
    } else if (command == "prepare" || command == "send" || command == "expect") {
      std::string id_hex;
      int32_t num_blocks = 0;
      size_t block_bytes = 0;
      uint64_t seed = 0;
      words >> id_hex >> num_blocks >> block_bytes >> seed;
      const TransferId id = Epoch::FromBytes(FromHex(id_hex))->bytes;
      Job& job = jobs[id];
      if (job.blocks == nullptr) {
        job.blocks = std::make_unique<Blocks>(num_blocks, block_bytes);
        if (command != "expect") job.blocks->Fill(seed);
      }
      if (command == "prepare") {
        Answer("prepared");
      } else if (command == "send") {
        job.outgoing = StartOutgoingTransfer(side.transport.get(), peer, id, 1);
        Answer("sending");
        for (int32_t i = 0; i < num_blocks; ++i) job.outgoing->SendBlock(i, (*job.blocks)[i]);
        job.outgoing->Finish([](OutgoingResult result) {
          Answer("sent " + std::string(absl::StatusCodeToString(result.status.code())) + " " +
                 std::to_string(result.blocks));
        });
      } else {
        IncomingSpec spec = SpecFor(id, peer, *job.blocks);
        const Blocks* const blocks = job.blocks.get();
        const absl::Status status =
            side.incoming->Expect(std::move(spec), [blocks, seed](IncomingResult result) {
              absl::StatusCode code = result.status.code();
              if (result.status.ok() && !blocks->HavePattern(seed)) {
                code = absl::StatusCode::kDataLoss;
              }
              Answer("ended " + std::string(absl::StatusCodeToString(code)) + " " +
                     std::to_string(result.blocks));
            });
        Answer(status.ok() ? "expecting" : std::string(status.message()));
      }
    } else if (command == "announce") {
      std::string id_hex;
      int32_t num_blocks = 0;
      uint64_t bytes = 0;
      words >> id_hex >> num_blocks >> bytes;
      const absl::Status status =
          side.incoming->Announce(Epoch::FromBytes(FromHex(id_hex))->bytes, num_blocks, bytes);
      Answer("announce " + std::string(absl::StatusCodeToString(status.code())));
    } else if (command == "fence") {
      std::string epoch_hex;
      words >> epoch_hex;
      const absl::Status status =
          side.transport->Fence(*Epoch::FromBytes(FromHex(epoch_hex)), absl::Seconds(10));
      Answer("fence " + std::string(absl::StatusCodeToString(status.code())));
    } else if (command == "tear") {
      int signal = 0;
      words >> signal;
      Answer(TearMessage(ParseAddress(words).second, signal) ? "tear OK" : "tear failed");
    } else {
      Answer("unknown command " + command);
    }
  }
  return 0;
}

}  // namespace
}  // namespace kv_transfer

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: kv_transfer_peer shm|tcp|shm_staged|tcp_staged|shm_shared|shm_device\n";
    return 2;
  }
  return kv_transfer::Main(argv[1]);
}
