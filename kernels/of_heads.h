// What:   the params of a launch or call over the heads of a shape: what they say of heads, the size of a row and the
//         scale of scores is the shape's; the rest is as its type has it.
#pragma once

#include <cmath>

#include "common/ids.h"

namespace carrel::kernels {

inline float ScaleOf(const AttentionShape& shape) {
  return 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
}

template <class Params>
Params OfHeads(const AttentionShape& shape) {
  Params params;
  if constexpr (requires { params.q_heads; }) params.q_heads = shape.q_heads;
  if constexpr (requires { params.kv_heads; }) params.kv_heads = shape.kv_heads;
  if constexpr (requires { params.group; }) params.group = shape.group();
  if constexpr (requires { params.head_dim; }) params.head_dim = shape.head_dim;
  if constexpr (requires { params.scale; }) params.scale = ScaleOf(shape);
  return params;
}

}  // namespace carrel::kernels
