// What:   the summaries of one head's zone, laid out as the GPU reads them: clusters of all segments
//         one behind the other, in float and int8 as they are stored (kvstore/index/summaries/summaries.h).
// Shapes: below. A cluster's number counts from the zone's first segment; a segment has
//         segment_clusters of them, its last ones perhaps without rows.
// Units:  spread already holds the share of it that counts.
// Threads: plain data.
#pragma once

#include <cstdint>
#include <vector>

namespace carrel::kernels {

// How zone rows lie in segments. Row r of the zone is row (first + r) % segment_rows of segment
// (first + r) / segment_rows.
struct SummarySegments {
  int64_t first = 0;
  int64_t segment_rows = 1;
  int64_t segment_clusters = 1;
};

struct SummaryTable {
  struct Cluster {
    float key_scale, spread, value_scale;
    float rows;  // of the zone; 0: the cluster does not count
  };
  SummarySegments segments;
  std::vector<int8_t> keys;          // [clusters, head_dim]: (mean of keys - centre) / key_scale
  std::vector<int8_t> values;        // [clusters, head_dim]: mean of V / value_scale
  std::vector<Cluster> clusters;     // [clusters]
  std::vector<uint8_t> row_cluster;  // [rows of the zone]: in the row's segment
  std::vector<float> centre;         // [head_dim]
};

}  // namespace carrel::kernels
