// What:   inverted lists over the mapped rows: k-means cells by Faiss, row ids only in the blob.
// Math:   the estimate of a head for a list is s = scale * (<q, mean> + <q, centroid>); its part of
//         the zone's sum is n exp(s + (scale |q|)^2 spread / 2), n rows of the list in the zone,
//         as if they lay evenly around the centroid. Lists are taken by max_h (s - lse), and all
//         their rows in the zone are scored exactly.
// Source: Faiss 1.7.3 Clustering; topk-decoding (001) uses IVF with its own copies of the keys.
// Cost:   reads all centroids once for the group, then the rows of `effort` lists.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

// Lists for so many rows: 4 sqrt(rows), unless asked for, and no more than rows.
int64_t IvfLists(int64_t asked_lists, int64_t rows);

absl::StatusOr<std::string> BuildIvf(const IndexParams& params, const Rows& keys,
                                     const SampledQueries* queries,
                                     Accelerator* accelerator = nullptr);
absl::StatusOr<std::unique_ptr<Index>> OpenIvf(const IndexParams& params, const Blob& blob,
                                               Rows keys);

}  // namespace carrel::kvstore
