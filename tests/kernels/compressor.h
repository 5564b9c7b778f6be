// One compressor of V4 with its cache and state slots, the reference in double, and the shapes that
// are tested.

#ifndef TESTS_KERNELS_COMPRESSOR_H_
#define TESTS_KERNELS_COMPRESSOR_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <ostream>
#include <vector>

#include "absl/types/span.h"
#include "kernels/compress_kv.h"
#include "kernels/cpu/kv_entry.h"
#include "kernels/store_kv.h"
#include "tests/kernels/test_weights.h"

namespace kernels {

inline constexpr int32_t kMaxPositions = 600;

struct CompressorShape {
  const char* name;
  int32_t ratio;
  bool overlap;
  int32_t dim;
  int32_t rope_dim;
  int32_t block_entries;
  KvFormat format = KvFormat::kFloat32;

  int32_t channels() const { return overlap ? 2 * dim : dim; }
  int32_t rotary() const { return format == KvFormat::kFp8IndexKey ? 0 : rope_dim; }
};
inline void PrintTo(const CompressorShape& shape, std::ostream* out) { *out << shape.name; }

// One compressor with its cache and its state slots, everything NaN before it is written.
class Compressor {
 public:
  Compressor(const CompressorShape& shape, uint32_t seed) : shape_(shape) {
    bias_ = RandomFloats(int64_t{shape.ratio} * shape.channels(), seed);
    norm_ = RandomFloats(shape.dim, seed + 1);
    for (int32_t p = 0; p < kMaxPositions; ++p) {
      for (int32_t i = 0; i < shape.rope_dim / 2; ++i) {
        const float angle = static_cast<float>(p) * std::pow(100.0f, -static_cast<float>(i));
        cos_.push_back(std::cos(angle));
        sin_.push_back(std::sin(angle));
      }
    }
    const int32_t entry_bytes =
        KvEntryBytes(shape.format, shape.dim - shape.rotary(), shape.rotary());
    block_stride_ = int64_t{shape.block_entries} * entry_bytes + 64;
    cache_.resize(static_cast<size_t>(kBlocks * block_stride_), std::byte{0xff});
    pages_ = {.base = cache_.data(),
              .block_stride = block_stride_,
              .block_size = shape.block_entries,
              .entry_bytes = entry_bytes,
              .format = shape.format};
    state_stride_ = CompressStateBytes(shape.dim, shape.overlap) + 64;
    state_.resize(static_cast<size_t>(kSlots * state_stride_ / 4),
                  std::numeric_limits<float>::quiet_NaN());
  }

  // A chunk of a sequence: its newest rows.
  struct Chunk {
    int32_t seq;
    int32_t begin, end;  // positions
    int32_t slot;
  };
  // Tokens of a sequence: [position, channels].
  using Tokens = std::vector<float>;

  // `run` is the operation over parameters that point to host memory.
  template <typename Run>
  auto Compress(const Run& run, const std::vector<Chunk>& chunks, const std::vector<Tokens>& kv,
                const std::vector<Tokens>& gate) {
    const auto channels = static_cast<size_t>(shape_.channels());
    std::vector<int32_t> cu = {0}, kv_len, slots, table;
    std::vector<float> kv_rows, gate_rows;
    for (const Chunk& chunk : chunks) {
      cu.push_back(cu.back() + chunk.end - chunk.begin);
      kv_len.push_back(chunk.end);
      slots.push_back(chunk.slot);
      for (int32_t i = 0; i < kBlocksPerSeq; ++i) table.push_back(BlockOf(chunk.seq, i));
      const auto seq = static_cast<size_t>(chunk.seq);
      const auto from = static_cast<size_t>(chunk.begin) * channels;
      const auto to = static_cast<size_t>(chunk.end) * channels;
      kv_rows.insert(kv_rows.end(), kv[seq].begin() + from, kv[seq].begin() + to);
      gate_rows.insert(gate_rows.end(), gate[seq].begin() + from, gate[seq].begin() + to);
    }
    return run(Params(cu, kv_len, slots, table, kv_rows, gate_rows));
  }

  CompressKvParams Params(const std::vector<int32_t>& cu, const std::vector<int32_t>& kv_len,
                          const std::vector<int32_t>& slots, const std::vector<int32_t>& table,
                          const std::vector<float>& kv, const std::vector<float>& gate) {
    return {.num_seqs = static_cast<int32_t>(kv_len.size()),
            .num_rows = cu.back(),
            .cu_seqlens_q = cu.data(),
            .kv_len = kv_len.data(),
            .block_table = table.data(),
            .block_table_stride = kBlocksPerSeq,
            .ratio = shape_.ratio,
            .overlap = shape_.overlap,
            .dim = shape_.dim,
            .kv = kv.data(),
            .kv_row_stride = shape_.channels(),
            .gate = gate.data(),
            .gate_row_stride = shape_.channels(),
            .position_bias = bias_.data(),
            .norm_weight = norm_.data(),
            .norm_eps = 1e-3f,
            .rope = {.cos = cos_.data(),
                     .sin = sin_.data(),
                     .rope_dim = shape_.rope_dim,
                     .max_positions = kMaxPositions},
            .pages = pages_,
            .state = reinterpret_cast<std::byte*>(state_.data()),
            .state_stride = state_stride_,
            .state_slots = slots.data()};
  }

  // Entries of a sequence as floats, [entries, dim].
  std::vector<float> Entries(int32_t seq, int32_t count) const {
    std::vector<float> values(static_cast<size_t>(count * shape_.dim));
    for (int32_t e = 0; e < count; ++e) {
      float* at = &values[static_cast<size_t>(e * shape_.dim)];
      const int64_t slot = int64_t{BlockOf(seq, e / shape_.block_entries)} * shape_.block_entries +
                           e % shape_.block_entries;
      cpu::LoadEntry(pages_, cpu::PlaceOfSlot(pages_, slot), shape_.dim - shape_.rotary(),
                     shape_.rotary(), at, at + shape_.dim - shape_.rotary());
    }
    return values;
  }

  // models.md 7.4, 7.5 in double.
  std::vector<double> Reference(const Tokens& kv, const Tokens& gate, int32_t count) const {
    std::vector<double> entries;
    const int32_t dim = shape_.dim, channels = shape_.channels();
    for (int32_t e = 0; e < count; ++e) {
      std::vector<double> r;
      for (int32_t d = 0; d < dim; ++d) {
        double sum = 0, weighted = 0;
        const auto add = [&](int32_t position, int32_t channel) {
          const auto at = static_cast<size_t>(position * channels + channel);
          const double weight =
              std::exp(double{gate[at]} +
                       bias_[static_cast<size_t>(position % shape_.ratio * channels + channel)]);
          sum += weight;
          weighted += weight * kv[at];
        };
        for (int32_t j = 0; j < shape_.ratio; ++j) {
          const int32_t position = e * shape_.ratio + j;
          if (shape_.overlap && e > 0) add(position - shape_.ratio, d);
          add(position, shape_.overlap ? dim + d : d);
        }
        r.push_back(weighted / sum);
      }
      r = RmsNormReference(r, norm_, 1e-3);
      const int32_t first = dim - shape_.rope_dim;
      for (int32_t i = 0; i < shape_.rope_dim / 2; ++i) {
        const auto at = static_cast<size_t>(e * shape_.ratio * (shape_.rope_dim / 2) + i);
        const double a = r[static_cast<size_t>(first + 2 * i)];
        const double b = r[static_cast<size_t>(first + 2 * i + 1)];
        r[static_cast<size_t>(first + 2 * i)] = a * cos_[at] - b * sin_[at];
        r[static_cast<size_t>(first + 2 * i + 1)] = b * cos_[at] + a * sin_[at];
      }
      entries.insert(entries.end(), r.begin(), r.end());
    }
    return entries;
  }

  const std::vector<std::byte>& cache() const { return cache_; }
  absl::Span<const float> StateOf(int32_t slot) const {
    return absl::MakeConstSpan(state_).subspan(
        static_cast<size_t>(slot * state_stride_ / 4),
        static_cast<size_t>(CompressStateBytes(shape_.dim, shape_.overlap) / 4));
  }
  Tokens RandomTokens(int32_t count, uint32_t seed) const {
    return RandomFloats(int64_t{count} * shape_.channels(), seed);
  }

  static constexpr int32_t kBlocksPerSeq = 40;
  static constexpr int32_t kSeqs = 3;
  static constexpr int32_t kBlocks = kSeqs * kBlocksPerSeq + 1;
  static constexpr int32_t kSlots = 6;
  // Every sequence's own, in no order.
  static int32_t BlockOf(int32_t seq, int32_t i) { return 1 + (i * 11 + 5) % 40 + 40 * seq; }

 private:
  const CompressorShape shape_;
  std::vector<float> bias_, norm_, cos_, sin_, state_;
  std::vector<std::byte> cache_;
  int64_t block_stride_ = 0;
  int64_t state_stride_ = 0;
  KvPages pages_;
};

inline std::vector<CompressorShape> CompressorShapes() {
  return {{"csa", 4, true, 96, 16, 16},
          {"hca", 32, false, 96, 16, 2},
          {"ratio_one", 1, false, 10, 0, 16},
          {"ratio_one_overlap", 1, true, 10, 2, 16},
          {"odd_ratio", 7, true, 70, 6, 3},
          {"csa_bfloat16", 4, true, 96, 16, 16, KvFormat::kBfloat16},
          {"csa_fp8", 4, true, 512, 64, 16, KvFormat::kFp8SharedKv},
          {"hca_fp8", 32, false, 80, 16, 2, KvFormat::kFp8SharedKv},
          {"index_key_fp8", 4, true, 128, 64, 16, KvFormat::kFp8IndexKey}};
}

}  // namespace kernels

#endif  // TESTS_KERNELS_COMPRESSOR_H_
