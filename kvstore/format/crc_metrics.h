// What: the counter of stored chunks that were not what was written.
#pragma once

#include "common/metrics.h"

namespace carrel::kvstore {

inline Counter& CrcFailures() {
  static Counter& failures = CounterOf("carrel_crc_failures_total",
                                       "Chunks of stored bytes that were not what was written.");
  return failures;
}

}  // namespace carrel::kvstore
