#include "tests/model/reference_network.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "model/config.h"
#include "status/check.h"

namespace model {
namespace {

class ReferenceNetwork {
 public:
  explicit ReferenceNetwork(const EditableCheckpoint& checkpoint) : checkpoint_(checkpoint) {
    const auto parsed = ParseModelConfig(checkpoint.config.dump(), "config.json");
    FERRY_CHECK(parsed.ok()) << parsed.status().ToString();
    config_ = *parsed;
    inv_freq_ = InverseFrequencies(config_.rope, config_.qk_rope_head_dim);
  }

  // [tokens, vocab].
  std::vector<double> Logits(absl::Span<const int32_t> tokens) {
    const std::vector<double> embedding = Values("model.embed_tokens.weight");
    Rows x;
    for (const int32_t token : tokens) {
      const auto begin = embedding.begin() + int64_t{token} * config_.hidden_size;
      x.emplace_back(begin, begin + config_.hidden_size);
    }
    for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      Add(x, Attention(prefix + "self_attn.",
                       Norm(x, prefix + "input_layernorm.weight", config_.rms_norm_eps)));
      const Rows a = Norm(x, prefix + "post_attention_layernorm.weight", config_.rms_norm_eps);
      Add(x, config_.IsMoeLayer(layer) ? Moe(prefix + "mlp.", a) : Mlp(prefix + "mlp.", a));
    }
    const Rows out =
        Multiply(config_.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight",
                 Norm(x, "model.norm.weight", config_.rms_norm_eps));
    std::vector<double> logits;
    for (const auto& row : out) logits.insert(logits.end(), row.begin(), row.end());
    return logits;
  }

 private:
  using Row = std::vector<double>;
  using Rows = std::vector<Row>;

  Row Values(const std::string& name) const { return checkpoint_.tensors.at(name).Values(); }

  static void Add(Rows& x, const Rows& y) {
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t i = 0; i < x[t].size(); ++i) x[t][i] += y[t][i];
    }
  }

  Rows Multiply(const std::string& name, const Rows& x) const {
    const Row w = Values(name);
    const size_t cols = x[0].size();
    Rows y(x.size(), Row(w.size() / cols));
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t row = 0; row < y[t].size(); ++row) {
        y[t][row] = std::inner_product(x[t].begin(), x[t].end(), w.begin() + row * cols, 0.0);
      }
    }
    return y;
  }

  Rows Norm(const Rows& x, const std::string& name, double eps) const {
    const Row g = Values(name);
    Rows y = x;
    for (Row& row : y) {
      const double square = std::inner_product(row.begin(), row.end(), row.begin(), 0.0);
      const double scale = 1 / std::sqrt(square / static_cast<double>(row.size()) + eps);
      for (size_t i = 0; i < row.size(); ++i) row[i] *= g[i] * scale;
    }
    return y;
  }

  void Rotate(double* x, size_t position) const { Rotate(x, position, config_.rope.interleave); }

  void Rotate(double* x, size_t position, bool interleave) const {
    const size_t half = inv_freq_.size();
    const Row before(x, x + 2 * half);
    const double factor = RopeAttentionFactor(config_.rope);
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<float>(position) * inv_freq_[i];
      const double c = std::cos(angle) * factor, s = std::sin(angle) * factor;
      const size_t first = interleave ? 2 * i : i;
      const size_t second = interleave ? 2 * i + 1 : i + half;
      x[first] = before[first] * c - before[second] * s;
      x[second] = before[second] * c + before[first] * s;
    }
  }

  Rows Attention(const std::string& prefix, const Rows& a) const {
    const size_t heads = config_.num_attention_heads, rank = config_.kv_lora_rank;
    const size_t nope = config_.qk_nope_head_dim, rope = config_.qk_rope_head_dim;
    const size_t qk = nope + rope, v = config_.v_head_dim;
    Rows q_a;
    if (config_.q_lora_rank > 0) {
      q_a = Norm(Multiply(prefix + "q_a_proj.weight", a), prefix + "q_a_layernorm.weight", 1e-6);
    }
    Rows q = config_.q_lora_rank == 0 ? Multiply(prefix + "q_proj.weight", a)
                                      : Multiply(prefix + "q_b_proj.weight", q_a);
    Rows kv_a = Multiply(prefix + "kv_a_proj_with_mqa.weight", a);
    Rows latent, k_rope;
    for (size_t t = 0; t < a.size(); ++t) {
      for (size_t m = 0; m < heads; ++m) Rotate(&q[t][m * qk + nope], t);
      latent.emplace_back(kv_a[t].begin(), kv_a[t].begin() + rank);
      k_rope.emplace_back(kv_a[t].begin() + rank, kv_a[t].end());
      Rotate(k_rope[t].data(), t);
    }
    const Rows kv =
        Multiply(prefix + "kv_b_proj.weight", Norm(latent, prefix + "kv_a_layernorm.weight", 1e-6));
    const std::vector<std::vector<bool>> attended = Attended(
        prefix + "indexer.", a, q_a, /*sparse=*/config_.family == ModelFamily::kDeepseekV32);
    Rows out(a.size(), Row(heads * v));
    for (size_t t = 0; t < a.size(); ++t) {
      for (size_t m = 0; m < heads; ++m) {
        Row p(t + 1);
        const double* query = &q[t][m * qk];
        for (size_t j = 0; j <= t; ++j) {
          const double* key = &kv[j][m * (nope + v)];
          p[j] = config_.softmax_scale() *
                 (std::inner_product(key, key + nope, query, 0.0) +
                  std::inner_product(k_rope[j].begin(), k_rope[j].end(), query + nope, 0.0));
          if (!attended[t][j]) p[j] = -std::numeric_limits<double>::infinity();
        }
        Softmax(p);
        for (size_t j = 0; j <= t; ++j) {
          for (size_t i = 0; i < v; ++i)
            out[t][m * v + i] += p[j] * kv[j][m * (nope + v) + nope + i];
        }
      }
    }
    return Multiply(prefix + "o_proj.weight", out);
  }

  // Which keys each token attends: all before it, or the indexer's choice among them.
  std::vector<std::vector<bool>> Attended(const std::string& prefix, const Rows& a, const Rows& q_a,
                                          bool sparse) const {
    std::vector<std::vector<bool>> attended(a.size());
    for (size_t t = 0; t < a.size(); ++t) attended[t].assign(t + 1, !sparse);
    if (!sparse) return attended;
    const size_t heads = config_.index_n_heads, dim = config_.index_head_dim;
    Rows q = Multiply(prefix + "wq_b.weight", q_a);
    Rows k = Multiply(prefix + "wk.weight", a);
    const Rows weights = Multiply(prefix + "weights_proj.weight", a);
    const Row gain = Values(prefix + "k_norm.weight"), bias = Values(prefix + "k_norm.bias");
    for (size_t t = 0; t < a.size(); ++t) {
      for (size_t m = 0; m < heads; ++m) Rotate(&q[t][m * dim], t, /*interleave=*/false);
      const double n = static_cast<double>(dim);
      const double mean = std::accumulate(k[t].begin(), k[t].end(), 0.0) / n;
      double variance = 0;
      for (const double x : k[t]) variance += (x - mean) * (x - mean) / n;
      for (size_t i = 0; i < dim; ++i) {
        k[t][i] = (k[t][i] - mean) / std::sqrt(variance + 1e-6) * gain[i] + bias[i];
      }
      Rotate(k[t].data(), t, /*interleave=*/false);
    }
    for (size_t t = 0; t < a.size(); ++t) {
      Row scores(t + 1);
      for (size_t j = 0; j <= t; ++j) {
        for (size_t m = 0; m < heads; ++m) {
          const double* query = &q[t][m * dim];
          scores[j] += weights[t][m] *
                       std::max(0.0, std::inner_product(k[j].begin(), k[j].end(), query, 0.0));
        }
      }
      const size_t count = std::min<size_t>(t + 1, config_.index_topk);
      for (const size_t j : Largest(scores, count)) attended[t][j] = true;
    }
    return attended;
  }

  static void Softmax(Row& row) {
    const double largest = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (double& value : row) sum += value = std::exp(value - largest);
    for (double& value : row) value /= sum;
  }

  Rows Mlp(const std::string& prefix, const Rows& a) const {
    Rows gate = Multiply(prefix + "gate_proj.weight", a);
    const Rows up = Multiply(prefix + "up_proj.weight", a);
    for (size_t t = 0; t < a.size(); ++t) {
      for (size_t i = 0; i < gate[t].size(); ++i) {
        gate[t][i] *= up[t][i] / (1 + std::exp(-gate[t][i]));
      }
    }
    return Multiply(prefix + "down_proj.weight", gate);
  }

  // Indices of the `count` largest.
  static std::vector<size_t> Largest(const Row& values, size_t count) {
    std::vector<size_t> order(values.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return values[a] > values[b]; });
    order.resize(count);
    return order;
  }

  Row ExpertWeights(const Row& router, const Row& bias) const {
    const kernels::GateConfig& gate = config_.gate;
    const bool v3 = gate.method == kernels::GateMethod::kNoAuxTc;
    Row scores = router;
    if (v3) {
      for (double& score : scores) score = 1 / (1 + std::exp(-score));
    } else {
      Softmax(scores);
    }
    Row choice = scores;
    for (size_t e = 0; e < bias.size(); ++e) choice[e] += bias[e];
    if (gate.method != kernels::GateMethod::kGreedy) {
      const size_t size = choice.size() / gate.num_groups;
      Row groups;
      for (int32_t g = 0; g < gate.num_groups; ++g) {
        Row members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
        std::sort(members.rbegin(), members.rend());
        groups.push_back(v3 ? members[0] + members[1] : members[0]);
      }
      const std::vector<size_t> kept = Largest(groups, gate.top_k_groups);
      for (size_t e = 0; e < choice.size(); ++e) {
        if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) {
          choice[e] = -std::numeric_limits<double>::infinity();
        }
      }
    }
    Row weights(scores.size());
    double sum = 0;
    for (const size_t e : Largest(choice, gate.top_k)) sum += weights[e] = scores[e];
    for (double& weight : weights) {
      weight *= gate.routed_scaling_factor / (gate.norm_topk_prob ? sum + 1e-20 : 1);
    }
    return weights;
  }

  Rows Moe(const std::string& prefix, const Rows& a) const {
    const Rows router = Multiply(prefix + "gate.weight", a);
    const Row bias = config_.gate.method == kernels::GateMethod::kNoAuxTc
                         ? Values(prefix + "gate.e_score_correction_bias")
                         : Row();
    Rows out = config_.n_shared_experts > 0 ? Mlp(prefix + "shared_experts.", a)
                                            : Rows(a.size(), Row(config_.hidden_size));
    for (int32_t e = 0; e < config_.gate.num_experts; ++e) {
      const Rows y = Mlp(prefix + "experts." + std::to_string(e) + ".", a);
      for (size_t t = 0; t < a.size(); ++t) {
        const double weight = ExpertWeights(router[t], bias)[e];
        for (size_t i = 0; i < out[t].size(); ++i) out[t][i] += weight * y[t][i];
      }
    }
    return out;
  }

  const EditableCheckpoint& checkpoint_;
  ModelConfig config_;
  std::vector<float> inv_freq_;
};

}  // namespace

std::vector<double> ReferenceLogits(const EditableCheckpoint& checkpoint,
                                    absl::Span<const int32_t> tokens) {
  return ReferenceNetwork(checkpoint).Logits(tokens);
}

}  // namespace model
