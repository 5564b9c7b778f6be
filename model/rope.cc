// RoPE and YaRN (models.md 3.3, 3.4), evaluated in float32 in transformers' order: angles in double
// differ from it by a few 1e-3 rad at position 1e5.

#include <algorithm>
#include <cmath>

#include "model/config.h"

namespace model {
namespace {

double YarnMscale(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

// The (fractional) dimension whose wavelength fits `rotations` times into the original context.
double CorrectionDim(const RopeConfig& rope, int32_t rope_dim, double rotations) {
  return rope_dim * std::log(rope.original_max_position_embeddings / (rotations * 2 * M_PI)) /
         (2 * std::log(rope.rope_theta));
}

}  // namespace

std::vector<float> InverseFrequencies(const RopeConfig& rope, int32_t rope_dim) {
  const int32_t half = rope_dim / 2;
  double low = 0;
  double high = 0;
  if (rope.yarn) {
    low = CorrectionDim(rope, rope_dim, rope.beta_fast);
    high = CorrectionDim(rope, rope_dim, rope.beta_slow);
    if (rope.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, rope_dim - 1.0);
    if (low == high) high += 0.001;
  }
  const auto base = static_cast<float>(rope.rope_theta);
  const auto factor = static_cast<float>(rope.factor);
  std::vector<float> inv_freq(half);
  for (int32_t i = 0; i < half; ++i) {
    const float pos_freq = std::pow(base, static_cast<float>(2 * i) / static_cast<float>(rope_dim));
    const float extrapolated = 1.0f / pos_freq;
    if (!rope.yarn) {
      inv_freq[i] = extrapolated;
      continue;
    }
    const float interpolated = 1.0f / (factor * pos_freq);
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f,
        1.0f);
    const float keep = 1.0f - ramp;
    inv_freq[i] = interpolated * (1.0f - keep) + extrapolated * keep;
  }
  return inv_freq;
}

float RopeAttentionFactor(const RopeConfig& rope) {
  if (!rope.yarn) return 1;
  if (rope.attention_factor != 0) return static_cast<float>(rope.attention_factor);
  if (rope.mscale != 0 && rope.mscale_all_dim != 0) {
    return static_cast<float>(YarnMscale(rope.factor, rope.mscale) /
                              YarnMscale(rope.factor, rope.mscale_all_dim));
  }
  return static_cast<float>(YarnMscale(rope.factor, 1));
}

RopeTables MakeRopeTables(const RopeConfig& rope, int32_t rope_dim, int32_t max_positions) {
  const std::vector<float> inv_freq = InverseFrequencies(rope, rope_dim);
  const float attention_factor = RopeAttentionFactor(rope);
  RopeTables tables;
  tables.cos.reserve(static_cast<size_t>(max_positions) * inv_freq.size());
  tables.sin.reserve(static_cast<size_t>(max_positions) * inv_freq.size());
  for (int32_t position = 0; position < max_positions; ++position) {
    for (const float frequency : inv_freq) {
      const float angle = static_cast<float>(position) * frequency;
      tables.cos.push_back(std::cos(angle) * attention_factor);
      tables.sin.push_back(std::sin(angle) * attention_factor);
    }
  }
  return tables;
}

float ModelConfig::softmax_scale() const {
  double scale = 1 / std::sqrt(static_cast<double>(qk_head_dim()));
  if (rope.yarn && rope.mscale_all_dim != 0) {
    const double mscale = YarnMscale(rope.factor, rope.mscale_all_dim);
    scale *= mscale * mscale;
  }
  return static_cast<float>(scale);
}

}  // namespace model
