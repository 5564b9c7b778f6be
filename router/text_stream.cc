#include "router/text_stream.h"

#include <algorithm>

namespace router {

TextStream::TextStream(const tokenizer::Tokenizer* tokenizer, const Options& options)
    : tokenizer_(tokenizer),
      stop_ids_(options.stop_ids),
      shown_special_ids_(options.shown_special_ids),
      include_stop_(options.include_stop),
      min_tokens_(options.min_tokens) {
  if (tokenizer_ == nullptr) return;
  decoder_.emplace(*tokenizer_, /*skip_special_tokens=*/false);
  matcher_.emplace(options.stops, options.include_stop);
}

bool TextStream::IsHidden(int32_t id, bool is_end) const {
  const auto among = [id](const std::vector<int32_t>& ids) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  if (is_end && !include_stop_ && among(stop_ids_)) return true;
  return tokenizer_->IsSpecial(id) && !among(shown_special_ids_);
}

TextStream::Piece TextStream::Add(absl::Span<const uint32_t> ids, bool ended, bool by_stop_id) {
  Piece piece;
  if (tokenizer_ == nullptr) {
    piece.num_tokens = static_cast<int32_t>(ids.size());
    return piece;
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto id = static_cast<int32_t>(ids[i]);
    ++piece.num_tokens;
    ++num_tokens_;
    // A model may have more ids than its tokenizer (padded vocabulary): those have no text.
    if (id < 0 || id >= tokenizer_->vocab_size()) continue;
    if (IsHidden(id, by_stop_id && i + 1 == ids.size())) continue;
    piece.text += matcher_->Add(decoder_->Add(id), num_tokens_ >= min_tokens_);
    if (matcher_->stopped()) {
      piece.stopped = true;
      return piece;
    }
  }
  if (ended) {
    piece.text += matcher_->Add(decoder_->Finish(), num_tokens_ >= min_tokens_);
    piece.stopped = matcher_->stopped();
    if (!piece.stopped) piece.text += matcher_->Finish();
  }
  return piece;
}

}  // namespace router
