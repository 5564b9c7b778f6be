// V4 in double precision and plain loops, as models.md 7 writes it: a prompt in, the logits of
// every position out.  No cache, no state, nothing shared with kernels/.

#ifndef TESTS_MODEL_REFERENCE_V4_H_
#define TESTS_MODEL_REFERENCE_V4_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "tests/model/editable_checkpoint.h"

namespace model {

// [tokens, vocab].  Tensors have their released names, BF16 or F32.
std::vector<double> ReferenceV4Logits(const EditableCheckpoint& checkpoint,
                                      absl::Span<const int32_t> tokens);

}  // namespace model

#endif  // TESTS_MODEL_REFERENCE_V4_H_
