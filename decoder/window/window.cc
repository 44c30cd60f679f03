#include "decoder/window/window.h"

#include <algorithm>
#include <cstring>

#include "common/status.h"

namespace carrel::decoder {

Window::Window(const AttentionShape& shape)
    : shape_(shape), heads_(static_cast<size_t>(shape.layers) * shape.kv_heads) {}

void Window::AddContextRows(Layer layer, KvHead kv_head, const void* k, const void* v,
                            int64_t rows) {
  Head& head = heads_[static_cast<size_t>(layer.value()) * shape_.kv_heads + kv_head.value()];
  CARREL_CHECK(head.k.empty());
  const int64_t numbers = rows * shape_.head_dim;
  const auto add = [numbers](const void* from, std::vector<uint16_t>& to) {
    to.resize(to.size() + static_cast<size_t>(numbers));
    std::memcpy(to.data() + to.size() - numbers, from,
                static_cast<size_t>(numbers) * sizeof(to[0]));
  };
  add(k, head.context_k);
  add(v, head.context_v);
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
  const auto floats = static_cast<size_t>(tokens * shape_.head_dim);
  for (Head& head : heads_) {
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
      CARREL_CHECK(values->end() - values->begin() >= floats);
      rows.insert(rows.end(), values->begin(), values->begin() + floats);
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
  for (const Head& head : heads_) {
    bytes += static_cast<int64_t>((head.k.capacity() + head.v.capacity()) * sizeof(float));
    bytes += static_cast<int64_t>((head.context_k.capacity() + head.context_v.capacity()) *
                                  sizeof(uint16_t));
  }
  return bytes;
}

}  // namespace carrel::decoder
