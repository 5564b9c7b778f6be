#include "kernels/cuda/fault.h"

#include "absl/strings/str_cat.h"

namespace kernels::cuda {

absl::Status FaultStatus(const Fault& fault) {
  switch (fault.kind) {
    case FaultKind::kNone:
      return absl::OkStatus();
    case FaultKind::kPosition:
      return absl::InternalError(absl::StrCat("cuda: row ", fault.index, ": position ", fault.value,
                                              " is outside the rope table"));
    case FaultKind::kNoBlock:
      return absl::InternalError(
          absl::StrCat("cuda: sequence ", fault.index, " has no block for position ", fault.value));
    case FaultKind::kBadSample:
      return absl::InternalError(absl::StrCat("cuda: head_and_sample: sample ", fault.index,
                                              ": a sampling parameter is out of range"));
  }
  return absl::InternalError("cuda: a fault of unknown kind");
}

}  // namespace kernels::cuda
