// What:   a head's summaries as a GPU reads them (kernels/attention/summary_attention/summary_table.h).
// Math:   clusters that lie wholly in the zone are copied. Of the others only rows of the zone count:
//         their number, and the mean of their V rows, made anew; key mean and spread stay the whole
//         cluster's, as in EstimateRest.
// Errors: DataLoss damaged summaries or rows.
// Threads: any.   Cost: reads the summaries, and the zone's first and last segment of V rows.
#pragma once

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "kernels/attention/summary_attention/summary_table.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/index/summaries/summaries.h"

namespace carrel::kvstore {

kernels::SummarySegments SummarySegmentsOf(const SummaryLayout& layout, RowRange zone);

// values: of the same head. The zone is not empty.
absl::StatusOr<kernels::SummaryTable> MakeSummaryTable(const Summaries& summaries,
                                                       const Rows& values, RowRange zone);

}  // namespace carrel::kvstore
