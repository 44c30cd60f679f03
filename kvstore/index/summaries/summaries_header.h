// What:   what precedes the segments in a blob of summaries (kvstore/index/summaries/summaries.h).
// Errors: DataLoss for bytes that are no such header: names what. FailedPrecondition: of another
//         version.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/index/rows/blob.h"
#include "kvstore/index/summaries/summaries.h"

namespace carrel::kvstore {

struct SummaryHeader {
  int64_t rows = 0;
  int64_t head_dim = 0;
  int64_t cluster_rows = 0;
  EstimateFit fit;
};

int64_t SummaryFirstOffset(int64_t head_dim);
std::string EncodeSummaryHeader(const SummaryHeader& header, const std::vector<float>& centre);
absl::StatusOr<SummaryHeader> DecodeSummaryHeader(const Blob& blob, std::vector<float>& centre);

}  // namespace carrel::kvstore
