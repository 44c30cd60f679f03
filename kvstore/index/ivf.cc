#include "kvstore/index/ivf.h"

#include "common/status.h"

namespace carrel::kvstore {

absl::StatusOr<std::string> BuildIvf(const IndexParams&, const Rows&) {
  return absl::UnimplementedError("ivf");
}
absl::StatusOr<std::unique_ptr<Index>> OpenIvf(const IndexParams&, const Blob&, Rows) {
  return absl::UnimplementedError("ivf");
}

}  // namespace carrel::kvstore
