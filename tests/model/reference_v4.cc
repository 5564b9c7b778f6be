#include "tests/model/reference_v4.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "model/config.h"
#include "status/check.h"

namespace model {
namespace {

class ReferenceV4 {
 public:
  // Tensors have their released names, BF16 or F32.
  explicit ReferenceV4(const EditableCheckpoint& checkpoint) : checkpoint_(checkpoint) {
    const auto parsed = ParseModelConfig(checkpoint.config.dump(), "config.json");
    FERRY_CHECK(parsed.ok()) << parsed.status().ToString();
    config_ = *parsed;
    dim_ = static_cast<size_t>(config_.qk_head_dim());
  }

  // [tokens, vocab].
  std::vector<double> Logits(absl::Span<const int32_t> tokens) {
    const Row embedding = Values("embed.weight");
    const auto hidden = static_cast<size_t>(config_.hidden_size);
    const auto n = static_cast<size_t>(config_.hc_mult);
    Rows x;  // the streams of a token end to end
    for (const int32_t token : tokens) {
      const auto begin = embedding.begin() + int64_t{token} * config_.hidden_size;
      Row streams;
      for (size_t j = 0; j < n; ++j) streams.insert(streams.end(), begin, begin + hidden);
      x.push_back(streams);
    }
    for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
      const std::string prefix = "layers." + std::to_string(layer) + ".";
      Mixes mixes = Mix(x, prefix + "hc_attn_");
      MixBack(Attention(prefix + "attn.", layer,
                        Norm(Collapse(x, mixes), Values(prefix + "attn_norm.weight"))),
              mixes, x);
      mixes = Mix(x, prefix + "hc_ffn_");
      MixBack(Experts(prefix + "ffn.", layer, tokens,
                      Norm(Collapse(x, mixes), Values(prefix + "ffn_norm.weight"))),
              mixes, x);
    }
    const Rows out = Multiply(Values(config_.tie_word_embeddings ? "embed.weight" : "head.weight"),
                              Norm(Collapse(x, Mix(x, "hc_head_")), Values("norm.weight")));
    Row logits;
    for (const Row& row : out) logits.insert(logits.end(), row.begin(), row.end());
    return logits;
  }

 private:
  using Row = std::vector<double>;
  using Rows = std::vector<Row>;
  struct TokenMix {
    Row pre, post, comb;
  };
  using Mixes = std::vector<TokenMix>;

  Row Values(const std::string& name) const { return checkpoint_.tensors.at(name).Values(); }

  static Row Multiply(const Row& w, const Row& x) {
    Row y(w.size() / x.size());
    for (size_t row = 0; row < y.size(); ++row) {
      y[row] = std::inner_product(x.begin(), x.end(), w.begin() + row * x.size(), 0.0);
    }
    return y;
  }
  static Rows Multiply(const Row& w, const Rows& x) {
    Rows y;
    for (const Row& row : x) y.push_back(Multiply(w, row));
    return y;
  }

  // Divided by the root mean square; `weight` may be empty.
  Row Norm(Row x, const Row& weight) const {
    const double square = std::inner_product(x.begin(), x.end(), x.begin(), 0.0);
    const double scale =
        1 / std::sqrt(square / static_cast<double>(x.size()) + config_.rms_norm_eps);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= scale * (weight.empty() ? 1 : weight[i]);
    return x;
  }
  Rows Norm(Rows x, const Row& weight) const {
    for (Row& row : x) row = Norm(row, weight);
    return x;
  }

  static double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

  Mixes Mix(const Rows& x, const std::string& prefix) const {
    const Row fn = Values(prefix + "fn"), base = Values(prefix + "base"),
              scale = Values(prefix + "scale");
    const auto n = static_cast<size_t>(config_.hc_mult);
    const double eps = config_.hc_eps;
    Mixes mixes;
    for (const Row& streams : x) {
      const Row m = Multiply(fn, Norm(streams, {}));
      TokenMix mix;
      for (size_t j = 0; j < n; ++j) mix.pre.push_back(Sigmoid(m[j] * scale[0] + base[j]) + eps);
      if (scale.size() > 1) {
        for (size_t k = 0; k < n; ++k) {
          mix.post.push_back(2 * Sigmoid(m[n + k] * scale[1] + base[n + k]));
        }
        for (size_t j = 0; j < n; ++j) {
          Row row;
          for (size_t k = 0; k < n; ++k) {
            row.push_back(std::exp(m[2 * n + j * n + k] * scale[2] + base[2 * n + j * n + k]));
          }
          const double sum = std::accumulate(row.begin(), row.end(), 0.0);
          for (const double value : row) mix.comb.push_back(value / sum + eps);
        }
        Normalise(/*rows=*/false, mix.comb);
        for (int32_t i = 1; i < config_.hc_sinkhorn_iters; ++i) {
          Normalise(true, mix.comb);
          Normalise(false, mix.comb);
        }
      }
      mixes.push_back(mix);
    }
    return mixes;
  }
  void Normalise(bool rows, Row& comb) const {
    const auto n = static_cast<size_t>(config_.hc_mult);
    for (size_t a = 0; a < n; ++a) {
      double sum = config_.hc_eps;
      for (size_t b = 0; b < n; ++b) sum += comb[rows ? a * n + b : b * n + a];
      for (size_t b = 0; b < n; ++b) comb[rows ? a * n + b : b * n + a] /= sum;
    }
  }
  Rows Collapse(const Rows& x, const Mixes& mixes) const {
    const auto hidden = static_cast<size_t>(config_.hidden_size);
    Rows u;
    for (size_t t = 0; t < x.size(); ++t) {
      Row row(hidden);
      for (size_t j = 0; j < mixes[t].pre.size(); ++j) {
        for (size_t i = 0; i < hidden; ++i) row[i] += mixes[t].pre[j] * x[t][j * hidden + i];
      }
      u.push_back(row);
    }
    return u;
  }
  void MixBack(const Rows& y, const Mixes& mixes, Rows& x) const {
    const auto hidden = static_cast<size_t>(config_.hidden_size);
    const auto n = static_cast<size_t>(config_.hc_mult);
    for (size_t t = 0; t < x.size(); ++t) {
      const Row before = x[t];
      for (size_t k = 0; k < n; ++k) {
        for (size_t i = 0; i < hidden; ++i) {
          double sum = mixes[t].post[k] * y[t][i];
          for (size_t j = 0; j < n; ++j) sum += mixes[t].comb[j * n + k] * before[j * hidden + i];
          x[t][k * hidden + i] = sum;
        }
      }
    }
  }

  // Rotates the last rotary values of a vector that ends at `end`, by `sign` times the position.
  void Rotate(double* end, int32_t layer, size_t position, double sign = 1) const {
    const RopeConfig& rope = config_.layer_types[layer] == LayerType::kSlidingAttention
                                 ? config_.rope
                                 : config_.compress_rope;
    const std::vector<float> inv_freq = InverseFrequencies(rope, config_.qk_rope_head_dim);
    double* x = end - config_.qk_rope_head_dim;
    for (size_t i = 0; i < inv_freq.size(); ++i) {
      const double angle = static_cast<float>(position) * inv_freq[i];
      const double c = std::cos(angle), s = sign * std::sin(angle);
      const double a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * c - b * s;
      x[2 * i + 1] = b * c + a * s;
    }
  }

  // Entries of every complete window (7.4, 7.5).
  Rows Compress(const std::string& prefix, int32_t layer, size_t ratio, bool overlap,
                const Rows& a) const {
    const Rows kv = Multiply(Values(prefix + "wkv.weight"), a);
    const Rows gate = Multiply(Values(prefix + "wgate.weight"), a);
    const Row ape = Values(prefix + "ape"), norm = Values(prefix + "norm.weight");
    const size_t dim = norm.size(), channels = kv[0].size();
    Rows entries;
    for (size_t e = 0; (e + 1) * ratio <= a.size(); ++e) {
      Row r(dim);
      for (size_t d = 0; d < dim; ++d) {
        Row scores, values;
        const auto add = [&](size_t window, size_t channel) {
          for (size_t j = 0; j < ratio; ++j) {
            scores.push_back(gate[window * ratio + j][channel] + ape[j * channels + channel]);
            values.push_back(kv[window * ratio + j][channel]);
          }
        };
        if (overlap && e > 0) add(e - 1, d);
        add(e, overlap ? dim + d : d);
        Softmax(scores);
        r[d] = std::inner_product(scores.begin(), scores.end(), values.begin(), 0.0);
      }
      r = Norm(r, norm);
      Rotate(r.data() + dim, layer, e * ratio);
      entries.push_back(r);
    }
    return entries;
  }

  static void Softmax(Row& row) {
    const double largest = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (double& value : row) sum += value = std::exp(value - largest);
    for (double& value : row) value /= sum;
  }

  // The entries that each token attends (7.6).
  std::vector<std::vector<size_t>> Select(const std::string& prefix, int32_t layer, const Rows& a,
                                          const Rows& ql) const {
    const auto ratio = static_cast<size_t>(config_.csa_ratio);
    const auto heads = static_cast<size_t>(config_.index_n_heads);
    const auto dim = static_cast<size_t>(config_.index_head_dim);
    const Rows keys = Compress(prefix + "compressor.", layer, ratio, true, a);
    Rows q = Multiply(Values(prefix + "wq_b.weight"), ql);
    const Rows w = Multiply(Values(prefix + "weights_proj.weight"), a);
    std::vector<std::vector<size_t>> selected;
    for (size_t t = 0; t < a.size(); ++t) {
      for (size_t j = 0; j < heads; ++j) Rotate(&q[t][(j + 1) * dim], layer, t);
      const size_t visible = (t + 1) / ratio;
      Row scores(visible);
      for (size_t e = 0; e < visible; ++e) {
        for (size_t j = 0; j < heads; ++j) {
          scores[e] += w[t][j] * std::max(0.0, std::inner_product(keys[e].begin(), keys[e].end(),
                                                                  q[t].begin() + j * dim, 0.0));
        }
      }
      std::vector<size_t> order(visible);
      std::iota(order.begin(), order.end(), size_t{0});
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t x, size_t y) { return scores[x] > scores[y]; });
      order.resize(std::min(visible, static_cast<size_t>(config_.index_topk)));
      selected.push_back(order);
    }
    return selected;
  }

  Rows Attention(const std::string& prefix, int32_t layer, const Rows& a) const {
    const auto heads = static_cast<size_t>(config_.num_attention_heads);
    const LayerType type = config_.layer_types[layer];
    const bool csa = type == LayerType::kCompressedSparseAttention;
    const Rows ql =
        Norm(Multiply(Values(prefix + "wq_a.weight"), a), Values(prefix + "q_norm.weight"));
    Rows q = Multiply(Values(prefix + "wq_b.weight"), ql);
    Rows kv = Norm(Multiply(Values(prefix + "wkv.weight"), a), Values(prefix + "kv_norm.weight"));
    for (size_t t = 0; t < a.size(); ++t) Rotate(kv[t].data() + dim_, layer, t);
    Rows entries;
    std::vector<std::vector<size_t>> selected(a.size());
    if (csa) {
      entries =
          Compress(prefix + "compressor.", layer, static_cast<size_t>(config_.csa_ratio), true, a);
      selected = Select(prefix + "indexer.", layer, a, ql);
    } else if (type == LayerType::kHeavilyCompressedAttention) {
      const auto ratio = static_cast<size_t>(config_.hca_ratio);
      entries = Compress(prefix + "compressor.", layer, ratio, false, a);
      for (size_t t = 0; t < a.size(); ++t) {
        selected[t].resize((t + 1) / ratio);
        std::iota(selected[t].begin(), selected[t].end(), size_t{0});
      }
    }
    const Row sink = Values(prefix + "attn_sink");
    const auto window = static_cast<size_t>(config_.sliding_window);
    Rows out(a.size(), Row(heads * dim_));
    for (size_t t = 0; t < a.size(); ++t) {
      std::vector<const Row*> keys;
      for (size_t j = t + 1 > window ? t + 1 - window : 0; j <= t; ++j) keys.push_back(&kv[j]);
      for (const size_t e : selected[t]) keys.push_back(&entries[e]);
      for (size_t m = 0; m < heads; ++m) {
        const auto begin = q[t].begin() + m * dim_;
        Row query = Norm(Row(begin, begin + dim_), {});
        Rotate(query.data() + dim_, layer, t);
        Row p;
        for (const Row* key : keys) {
          p.push_back(std::inner_product(key->begin(), key->end(), query.begin(), 0.0) /
                      std::sqrt(static_cast<double>(dim_)));
        }
        p.push_back(sink[m]);
        Softmax(p);
        double* o = &out[t][m * dim_];
        for (size_t j = 0; j < keys.size(); ++j) {
          for (size_t i = 0; i < dim_; ++i) o[i] += p[j] * (*keys[j])[i];
        }
        Rotate(o + dim_, layer, t, -1);
      }
    }
    return Multiply(Values(prefix + "wo_b.weight"), GroupedOutput(prefix, out));
  }

  Rows GroupedOutput(const std::string& prefix, const Rows& out) const {
    const Row w = Values(prefix + "wo_a.weight");
    const auto groups = static_cast<size_t>(config_.o_groups);
    const auto rank = static_cast<size_t>(config_.o_lora_rank);
    Rows z;
    for (const Row& row : out) {
      const size_t width = row.size() / groups;
      Row all;
      for (size_t g = 0; g < groups; ++g) {
        const Row part =
            Multiply(Row(w.begin() + g * rank * width, w.begin() + (g + 1) * rank * width),
                     Row(row.begin() + g * width, row.begin() + (g + 1) * width));
        all.insert(all.end(), part.begin(), part.end());
      }
      z.push_back(all);
    }
    return z;
  }

  Row Expert(const std::string& prefix, const Row& a) const {
    const double limit = config_.swiglu_limit;
    Row gate = Multiply(Values(prefix + "w1.weight"), a);
    Row up = Multiply(Values(prefix + "w3.weight"), a);
    for (size_t i = 0; i < gate.size(); ++i) {
      if (limit > 0) gate[i] = std::min(gate[i], limit), up[i] = std::clamp(up[i], -limit, limit);
      gate[i] *= up[i] / (1 + std::exp(-gate[i]));
    }
    return Multiply(Values(prefix + "w2.weight"), gate);
  }

  Rows Experts(const std::string& prefix, int32_t layer, absl::Span<const int32_t> tokens,
               const Rows& a) const {
    const auto top_k = static_cast<size_t>(config_.gate.top_k);
    const Rows router = Multiply(Values(prefix + "gate.weight"), a);
    Rows out;
    for (size_t t = 0; t < a.size(); ++t) {
      Row scores;
      for (const double logit : router[t]) scores.push_back(std::sqrt(std::log1p(std::exp(logit))));
      std::vector<size_t> ids(scores.size());
      std::iota(ids.begin(), ids.end(), size_t{0});
      if (config_.hash_moe[layer]) {
        const std::string& table = checkpoint_.tensors.at(prefix + "gate.tid2eid").bytes;
        for (size_t i = 0; i < top_k; ++i) {
          int64_t id;
          std::memcpy(&id, table.data() + (static_cast<size_t>(tokens[t]) * top_k + i) * 8, 8);
          ids[i] = static_cast<size_t>(id);
        }
      } else {
        const Row bias = Values(prefix + "gate.bias");
        std::stable_sort(ids.begin(), ids.end(), [&](size_t x, size_t y) {
          return scores[x] + bias[x] > scores[y] + bias[y];
        });
      }
      double sum = 0;
      for (size_t i = 0; i < top_k; ++i) sum += scores[ids[i]];
      Row y = Expert(prefix + "shared_experts.", a[t]);
      for (size_t i = 0; i < top_k; ++i) {
        const Row part = Expert(prefix + "experts." + std::to_string(ids[i]) + ".", a[t]);
        const double weight = scores[ids[i]] / sum * config_.gate.routed_scaling_factor;
        for (size_t c = 0; c < y.size(); ++c) y[c] += weight * part[c];
      }
      out.push_back(y);
    }
    return out;
  }

  const EditableCheckpoint& checkpoint_;
  ModelConfig config_;
  size_t dim_ = 0;
};

}  // namespace

std::vector<double> ReferenceV4Logits(const EditableCheckpoint& checkpoint,
                                      absl::Span<const int32_t> tokens) {
  return ReferenceV4(checkpoint).Logits(tokens);
}

}  // namespace model
