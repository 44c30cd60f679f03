#include "decoder/window/window.h"

#include <algorithm>

#include "common/dtype.h"
#include "common/status.h"

namespace carrel::decoder {

Window::Window(const AttentionShape& shape)
    : shape_(shape), heads_(static_cast<size_t>(shape.layers) * shape.kv_heads) {}

void Window::AddContextRows(Layer layer, KvHead kv_head, const void* k, const void* v,
                            int64_t rows) {
  Head& head = heads_[static_cast<size_t>(layer.value()) * shape_.kv_heads + kv_head.value()];
  CARREL_CHECK(head.k.size() == head.context_floats);
  const int64_t floats = rows * shape_.head_dim;
  head.context_floats += static_cast<size_t>(floats);
  head.k.resize(head.context_floats);
  head.v.resize(head.context_floats);
  WidenToFloat(DType::kBf16, k, floats, head.k.data() + head.k.size() - floats);
  WidenToFloat(DType::kBf16, v, floats, head.v.data() + head.v.size() - floats);
}

void Window::Append(Layer layer, const float* k, const float* v, int64_t n) {
  const int64_t d = shape_.head_dim;
  for (int32_t h = 0; h < shape_.kv_heads; ++h) {
    Head& head = heads_[static_cast<size_t>(layer.value()) * shape_.kv_heads + h];
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = (i * shape_.kv_heads + h) * d;
      head.k.insert(head.k.end(), k + at, k + at + d);
      head.v.insert(head.v.end(), v + at, v + at + d);
    }
  }
}

void Window::Truncate(int64_t tokens) {
  for (Head& head : heads_) {
    const size_t floats = head.context_floats + static_cast<size_t>(tokens * shape_.head_dim);
    head.k.resize(std::min(head.k.size(), floats));
    head.v.resize(std::min(head.v.size(), floats));
  }
}

std::vector<float> Window::Copy(int64_t tokens) const {
  const auto floats = static_cast<std::ptrdiff_t>(tokens * shape_.head_dim);
  std::vector<float> rows;
  rows.reserve(2 * heads_.size() * static_cast<size_t>(floats));
  for (const Head& head : heads_) {
    for (const std::vector<float>* values : {&head.k, &head.v}) {
      const auto first = values->begin() + static_cast<std::ptrdiff_t>(head.context_floats);
      CARREL_CHECK(values->end() - first >= floats);
      rows.insert(rows.end(), first, first + floats);
    }
  }
  return rows;
}

bool Window::Restore(const std::vector<float>& rows, int64_t tokens) {
  const auto floats = static_cast<std::ptrdiff_t>(tokens * shape_.head_dim);
  if (rows.size() != 2 * heads_.size() * static_cast<size_t>(floats)) return false;
  Truncate();
  auto from = rows.begin();
  for (Head& head : heads_) {
    for (std::vector<float>* values : {&head.k, &head.v}) {
      values->insert(values->end(), from, from + floats);
      from += floats;
    }
  }
  return true;
}

int64_t Window::bytes() const {
  int64_t bytes = 0;
  for (const Head& head : heads_)
    bytes += static_cast<int64_t>((head.k.capacity() + head.v.capacity()) * sizeof(float));
  return bytes;
}

}  // namespace carrel::decoder
