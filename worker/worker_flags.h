// The command-line flags of WorkerOptions, for the two workers' main files.  CLI11 appears in main
// files and in worker_flags.cc only.

#ifndef WORKER_WORKER_FLAGS_H_
#define WORKER_WORKER_FLAGS_H_

#include "worker/worker_options.h"

namespace CLI {
class App;
}

namespace worker {

// `options` must outlive the parsing; its present values are the defaults shown by --help.
void AddWorkerFlags(CLI::App& app, WorkerOptions* options);

}  // namespace worker

#endif  // WORKER_WORKER_FLAGS_H_
