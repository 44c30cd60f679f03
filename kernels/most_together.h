// What: how many sequences share a launch, of kernels that take several. So many of an 8B shape choose among
//       131,000 rows in one launch of code_topk; the arguments of more would make each launch slower.
#pragma once

#include <cstdint>

namespace carrel::kernels {

inline constexpr int64_t kMostTogether = 8;

}  // namespace carrel::kernels
