// What:   an index whose blob holds links between the mapped rows: the walk that hnsw and graph
//         share. From where it starts it goes on to the best row met so far until none of those
//         left is better than the worst of the beam; one walk per head of the group.
// Math:   lse of a head: the rows that its walk kept count themselves; those below stand in the
//         sample of the zone, scored exactly.
// Ownership: a type's name is a literal.
#pragma once

#include <algorithm>
#include <memory>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"
#include "kvstore/index/index_type.h"
#include "lab/kinds/links/hnsw_links.h"

namespace carrel::kvstore {

// What hnsw and graph have in common. A blob of the latter has ef_construction 0 and one level.
class LinkType : public IndexType {
 public:
  absl::string_view name() const override { return name_; }
  bool lab() const override { return true; }
  // InvalidArgument or DataLoss if the links are not of these rows.
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams& params, Blob blob,
                                              Rows keys) const override;
  absl::string_view effort_word() const override { return "beam width"; }
  int64_t DefaultEffort(const IndexParams&, int64_t top_k, int64_t) const override {
    return std::max<int64_t>(128, beam_ * top_k);
  }
  double SearchNs(const IndexParams&, const SearchResult& result, int64_t, int64_t) const override {
    return kWalkedNs * static_cast<double>(result.visited);
  }

 protected:
  // beam: rows of it for each that is wanted.
  LinkType(absl::string_view name, int64_t beam) : name_(name), beam_(beam) {}

 private:
  const absl::string_view name_;
  const int64_t beam_;
};

}  // namespace carrel::kvstore
