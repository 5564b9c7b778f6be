#include "bench/kernel_trace.h"

#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace bench {
namespace {

constexpr size_t kBufferBytes = size_t{8} << 20;
constexpr size_t kAlignment = 8;  // CUPTI's, of records

std::mutex mutex;  // guards collected
std::vector<KernelSpan> collected;

void Check(CUptiResult result, const char* what) {
  if (result == CUPTI_SUCCESS) return;
  const char* why = nullptr;
  cuptiGetResultString(result, &why);
  std::fprintf(stderr, "kernel trace: %s: %s\n", what, why == nullptr ? "unknown" : why);
  std::exit(1);
}

// "void ns::Kernel<...>(...)" is "Kernel".
std::string ShortName(const char* mangled) {
  int status = 0;
  char* const demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : mangled;
  std::free(demangled);
  for (size_t at; (at = name.find("(anonymous namespace)")) != std::string::npos;)
    name.erase(at, 21);
  name.resize(std::min(name.size(), name.find_first_of("<(")));
  const size_t start = name.find_last_of(": ");
  return start == std::string::npos ? name : name.substr(start + 1);
}

void CUPTIAPI GiveBuffer(uint8_t** buffer, size_t* size, size_t* max_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, kBufferBytes));
  *size = kBufferBytes;
  *max_records = 0;  // as many as fit
}

void CUPTIAPI TakeBuffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid_bytes) {
  std::lock_guard lock(mutex);
  for (CUpti_Activity* record = nullptr;
       cuptiActivityGetNextRecord(buffer, valid_bytes, &record) == CUPTI_SUCCESS;) {
    if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
    collected.push_back({ShortName(kernel->name), static_cast<int64_t>(kernel->start),
                         static_cast<int64_t>(kernel->end)});
  }
  std::free(buffer);
}

}  // namespace

KernelTrace::KernelTrace() {
  Check(cuptiActivityRegisterCallbacks(GiveBuffer, TakeBuffer), "callbacks");
}

KernelTrace::~KernelTrace() { cuptiActivityFlushAll(1); }

void KernelTrace::Start() {
  std::lock_guard lock(mutex);
  collected.clear();
  Check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "enabling records of kernels");
}

std::vector<KernelSpan> KernelTrace::Stop() {
  Check(cuptiActivityDisable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL),
        "disabling records of kernels");
  Check(cuptiActivityFlushAll(0), "collecting records");
  std::lock_guard lock(mutex);
  std::vector<KernelSpan> spans = std::move(collected);
  collected.clear();
  std::sort(spans.begin(), spans.end(),
            [](const KernelSpan& a, const KernelSpan& b) { return a.start_ns < b.start_ns; });
  return spans;
}

}  // namespace bench
