#include "decoder/sources/query_trace.h"

#include <algorithm>

namespace carrel::decoder {
namespace {

// Of rows of `width` floats the first, third, ..
void KeepEveryOther(std::vector<float>& values, size_t width) {
  const size_t rows = values.size() / width;
  for (size_t i = 1; 2 * i < rows; ++i) {
    std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(2 * i * width), width,
                values.begin() + static_cast<std::ptrdiff_t>(i * width));
  }
  values.resize((rows + 1) / 2 * width);
}

}  // namespace

QueryTrace::QueryTrace(const AttentionShape& shape) : shape_(shape), layers_(shape.layers) {}

void QueryTrace::Clear() {
  for (Kept& layer : layers_) {
    layer.q.clear();
    layer.lse.clear();
  }
  steps_.clear();
  seen_ = 0;
  stride_ = 1;
  keeping_ = false;
}

bool QueryTrace::BeginBlock(bool keep) {
  keeping_ = false;
  if (!keep) return false;
  const int64_t step = seen_++;
  if (step % stride_ != 0) return false;
  if (tokens() == kMaxTokens) DropEveryOther();
  if (step % stride_ != 0) return false;
  steps_.push_back(step);
  keeping_ = true;
  return true;
}

void QueryTrace::DropEveryOther() {
  stride_ *= 2;
  const auto heads = static_cast<size_t>(shape_.q_heads);
  for (Kept& layer : layers_) {
    KeepEveryOther(layer.q, heads * static_cast<size_t>(shape_.head_dim));
    KeepEveryOther(layer.lse, heads);
  }
  for (size_t i = 1; 2 * i < steps_.size(); ++i) steps_[i] = steps_[2 * i];
  steps_.resize((steps_.size() + 1) / 2);
}

void QueryTrace::Add(Layer layer, const float* q, const float* lse, int64_t n) {
  if (!keeping_ || n == 0) return;
  const int64_t heads = shape_.q_heads, floats = heads * shape_.head_dim;
  Kept& kept = layers_[layer.value()];
  kept.q.insert(kept.q.end(), q + (n - 1) * floats, q + n * floats);
  kept.lse.insert(kept.lse.end(), lse + (n - 1) * heads, lse + n * heads);
}

}  // namespace carrel::decoder
