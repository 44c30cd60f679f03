// What:   what a caller may do, and which right each call of the services needs: the one table,
//         whatever the transport.
// Errors: InvalidArgument a right that does not exist; PermissionDenied a call that the table does
//         not list.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace carrel::kvstore {

enum class Right : uint8_t {
  kList = 0,    // see which contexts there are, their manifests, and what the process did
  kOpen = 1,    // open a session on a context, which gives out its rows; export it
  kImport = 2,  // add a context
  kDelete = 3,  // remove one
  kAdmin = 4,   // what concerns the process or every context: verify, refresh
};

class Rights {
 public:
  constexpr Rights() = default;
  constexpr Rights(std::initializer_list<Right> rights) {
    for (const Right right : rights) Add(right);
  }
  static constexpr Rights All() {
    return {Right::kList, Right::kOpen, Right::kImport, Right::kDelete, Right::kAdmin};
  }
  constexpr void Add(Right right) { bits_ |= 1u << static_cast<unsigned>(right); }
  constexpr bool Has(Right right) const { return (bits_ >> static_cast<unsigned>(right)) & 1u; }
  constexpr bool empty() const { return bits_ == 0; }
  bool operator==(const Rights&) const = default;

 private:
  uint32_t bits_ = 0;
};

absl::string_view RightName(Right right);
absl::StatusOr<Right> ParseRight(absl::string_view name);
std::string RightNames(Rights rights);  // "list open"; "none"

struct RpcRight {
  absl::string_view rpc;  // "Service.Method", without the package; of HTTP "METHOD /route/{}"
  Right right;
};
absl::Span<const RpcRight> RpcRights();
absl::Span<const RpcRight> HttpRights();
absl::StatusOr<Right> RightOf(absl::string_view rpc);

}  // namespace carrel::kvstore
