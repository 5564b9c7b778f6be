// DecodeShape: the counts that a decode step's launches depend on, rounded up so that steps with
// about as many sequences and keys share them.  A plan padded to its shape runs through launches
// that were recorded for another plan of this shape.

#ifndef ENGINE_DECODE_SHAPE_H_
#define ENGINE_DECODE_SHAPE_H_

#include <compare>
#include <cstdint>
#include <optional>

#include "model/step_plan.h"

namespace engine {

struct DecodeShape {
  int32_t num_seqs = 0;  // each of one row
  int32_t num_splits = 0;
  int32_t num_samples = 0;
  friend auto operator<=>(const DecodeShape&, const DecodeShape&) = default;
};

// Nothing for a plan that asks Network::Forward for more than rows attended in absorbed form, one
// of each sequence, and samples of them: that has prompts, copies, penalty resets or logit rows.
std::optional<DecodeShape> ShapeOfDecode(const model::StepPlan& plan);

// Adds sequences without keys, whose rows go nowhere, splits of no sequence, and samples that
// nobody reads.  REQUIRES: shape == ShapeOfDecode(plan).
void PadDecode(const DecodeShape& shape, model::StepPlan& plan);

}  // namespace engine

#endif  // ENGINE_DECODE_SHAPE_H_
