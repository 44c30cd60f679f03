// What:  a part of a text in which no added token is recognised: what somebody wrote, between what a
//        chat template says.
// Units: bytes.
#pragma once

#include <cstdint>

namespace carrel::model {

// [begin, end)
struct PlainRange {
  int64_t begin = 0;
  int64_t end = 0;
};

}  // namespace carrel::model
