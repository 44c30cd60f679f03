// What:   an index whose blob holds links between the mapped rows: the walk that hnsw and graph
//         share. From where it starts it goes on to the best row met so far until none of those
//         left is better than the worst of the beam; one walk per head of the group.
// Math:   lse of a head: the rows that its walk kept count themselves; those below stand in the
//         sample of the zone, scored exactly.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"
#include "lab/kinds/links/hnsw_links.h"

namespace carrel::kvstore {

// InvalidArgument or DataLoss if the links are not of these rows.
absl::StatusOr<std::unique_ptr<Index>> OpenLinkIndex(const IndexParams& params, HnswLinks links,
                                                     Rows keys);

}  // namespace carrel::kvstore
