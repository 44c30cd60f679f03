// What:   rows per KV head that reach a fidelity, from what prefill measured of the context
//         (kvstore/index/summaries/fidelity.h; carrel/v1/context.proto, HeadFidelity).
// Math:   with e_i(k) the mean square that k rows leave of KV head i's outputs and y_i the mean
//         square of an output in its layer (mean over the layer's heads),
//           error(k_1 ..) = sqrt(mean_i e_i(k_i) / y_i).
//         The plan has the least sum of k_i with error <= target: for some price of a row, each
//         head takes the k with the least e_i(k) / y_i + price k. Between measured numbers of rows
//         e is a power of k.
// Edge:   where even the most rows measured leave more, every head gets those; error says what they
//         leave.
// Source: ours (decision 028).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "retrieval/opened.h"

namespace carrel::decoder {

enum class Fidelity : uint8_t { kFast = 0, kBalanced = 1, kFaithful = 2 };

// The error that a name stands for.
double TargetError(Fidelity fidelity);
absl::StatusOr<Fidelity> ParseFidelity(absl::string_view name);

// A zone of fewer rows is attended whole under any fidelity: so few cost next to nothing, and of a
// short text what its own queries leave says little of a question's (decision 092).
inline constexpr int64_t kWholeZoneRows = 1024;

// Of one layer and KV head.
struct HeadErrors {
  double output = 0;          // mean square of an output of the layer
  std::vector<int64_t> rows;  // ascending, at least one
  std::vector<double> error;  // [rows]
};

struct RowPlan {
  std::vector<int64_t> rows;  // [layers, kv_heads]
  double error = 0;           // promised
};

// Of a context: [layers, kv_heads]. estimate: whether the decoder's attention has the estimation
// term. FailedPrecondition: the context was not measured; DataLoss: it is not whole.
absl::StatusOr<std::vector<HeadErrors>> ErrorsOf(const retrieval::ContextFacts& context,
                                                 bool estimate);
// Whether on queries of what may come behind the document, too; else on its own alone.
bool MeasuredOnProbe(const retrieval::ContextFacts& context);

// target > 0; of heads [first, end) that are planned; the others get no rows and no error.
RowPlan PlanRows(const std::vector<HeadErrors>& heads, int64_t first, int64_t zone_rows,
                 double target);

}  // namespace carrel::decoder
