// V2, V3 and V3.2 in double precision and plain loops, as models.md 3-6 write them: a prompt in,
// the logits of every position out.  Decompressed attention, no cache, nothing shared with
// kernels/.

#ifndef TESTS_MODEL_REFERENCE_NETWORK_H_
#define TESTS_MODEL_REFERENCE_NETWORK_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "tests/model/editable_checkpoint.h"

namespace model {

// [tokens, vocab].
std::vector<double> ReferenceLogits(const EditableCheckpoint& checkpoint,
                                    absl::Span<const int32_t> tokens);

}  // namespace model

#endif  // TESTS_MODEL_REFERENCE_NETWORK_H_
