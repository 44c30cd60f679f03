// What:   sampled values of the weights that computed a context, and whether other weights were made
//         from the same checkpoint by rounding it (docs/decisions/044-derived-weights.md).
// Math:   a quantiser gives each weight w the value v, of those that its block's scales leave it
//         (kernels/layer/dequantize/code_values.h), that is nearest to w. So with the block's own scales,
//         of weights that the file was made from nearly no w has a nearer value than v; a change by
//         d puts a share of about |d| / step beyond. And w lies anywhere between two values: who
//         adds something to dequantised weights leaves w nearer to v than to those of a grid that
//         knows nothing of w, without being v (of runs with few different values, which are
//         dequantised and no more, this is not asked). Both are counted over the whole checkpoint, each
//         layer, each kind of matrix, and each matrix.
// Edge:   plain types (f32, f16, bf16) must be w, rounded once; norms and biases among them.
// Cost:   taking and checking read a few pages of each matrix.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/ids.h"
#include "model/tokenizer/tokenizer.h"
#include "model/weights.h"

namespace carrel::model {

// Elements that lie together; of a row of 32 or more, within one row.
inline constexpr int64_t kProbeRun = 32;

struct WeightsProbe {
  struct Tensor {
    std::string name;  // of a Hugging Face checkpoint
    DType dtype = DType::kF32;
    std::vector<int64_t> shape;
    std::vector<int64_t> runs;  // first element of each
    std::string values;         // of the runs, one behind the other, as the checkpoint has them
  };
  struct Token {
    TokenId id = 0;
    std::string text;  // its bytes
  };
  std::vector<Tensor> tensors;  // by name; empty: the weights were quantised, nothing can be shown
  std::vector<Token> tokens;    // sampled; empty: no tokenizer
};

// Of 8 runs of each matrix (2,048 of all experts together) and one of each vector; where they lie
// follows from name and shape alone. The tokenizer may be null.
// Cost in bytes: 0.5 KiB per matrix of 16-bit weights.
WeightsProbe TakeWeightsProbe(const Weights& weights, const Tokenizer* tokenizer);

// What was seen of weights that may be derived.
struct Derivation {
  int64_t matrices = 0;
  int64_t values = 0;         // compared
  int64_t quantised = 0;      // of these, in blocks
  double beyond = 0;          // share of them that another value would have been nearer to
  double beyond_allowed = 0;  // what rounding may leave, with what chance adds
  double spread = 0;  // mean square of v - w, as a share of a grid's that knows nothing of w;
                      // 0: the weights are the file's own, dequantised
};

// FailedPrecondition if the weights were not shown to be made from the probe's (names tensor, layer
// or kind of matrix, what was counted and its bound), or the probe is empty.
absl::StatusOr<Derivation> CheckDerivedWeights(const WeightsProbe& probe, const Weights& weights);

// FailedPrecondition if an id that both know stands for other bytes (names it).
absl::Status CheckSameTokens(const WeightsProbe& probe, const Tokenizer& tokenizer);

}  // namespace carrel::model
