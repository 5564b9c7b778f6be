// cuda_kernels [name] [--json FILE]: every kernel by itself, beside its floor (bytes at the speed
// of a copy, products at the sustained rate), its bar and the best public kernel on the same GPU.
// With a name only the rows that contain it.  tools/kernel_report.py makes docs/kernels.md of it.

#include <string>

#include "CLI/CLI.hpp"
#include "bench/kernel_bench.h"

int main(int argc, char** argv) {
  CLI::App app("Every CUDA kernel by itself");
  std::string name, json;
  app.add_option("name", name, "only rows that contain it");
  app.add_option("--json", json, "file for the rows");
  CLI11_PARSE(app, argc, argv);
  bench::KernelBench bench(name);
  bench::TimeDecode(bench);
  bench::TimePrefill(bench);
  bench::TimeSparse(bench);
  bench::TimeQuantized(bench);
  if (!json.empty()) bench.WriteJson(json);
}
