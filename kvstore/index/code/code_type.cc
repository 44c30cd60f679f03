#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/lab.h"
#include "common/status.h"
#include "kvstore/index/code/code.h"
#include "kvstore/index/index_type.h"

namespace carrel::kvstore {
namespace {

class CodeType final : public IndexType {
 public:
  absl::string_view name() const override { return "code"; }
  std::string Describe(const IndexParams& params) const override {
    return absl::StrCat(
        params.code_bits, " bits, ",
        learns(params) ? absl::StrCat("learned (", TrainingOf(params), ")") : "random",
        " directions, ", CodeScanName(params.code_scan), " scan");
  }
  std::vector<IndexField> Fields(const IndexParams& params) const override {
    return {{"code_bits", params.code_bits},
            {"code_training", static_cast<int64_t>(params.code_training), TrainingOf(params)},
            {"code_scan", static_cast<int64_t>(params.code_scan), CodeScanName(params.code_scan)}};
  }
  absl::Status Validate(const IndexParams& params) const override {
    RETURN_IF_ERROR(CheckIndexField("code_training", static_cast<int>(params.code_training), 0,
                                    static_cast<int>(CodeTraining::kHata)));
    RETURN_IF_ERROR(CheckIndexField("code_scan", static_cast<int>(params.code_scan), 0,
                                    static_cast<int>(CodeScan::kSymmetric)));
    if (params.code_bits == 64 || params.code_bits == 128 || params.code_bits == 256) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("index: code_bits=", params.code_bits, ", must be 64, 128 or 256"));
  }

  absl::Status CheckBuild(const IndexParams& params) const override {
    if (params.code_training != CodeTraining::kHata) return absl::OkStatus();
    return CheckLab("code-train=hata");
  }
  absl::StatusOr<std::string> Build(const IndexParams& params, const Rows& keys,
                                    const SampledQueries* queries,
                                    Accelerator* accelerator) const override {
    return BuildCode(params, keys, queries, accelerator);
  }
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams& params, Blob blob,
                                              Rows keys) const override {
    return OpenCode(params, std::move(blob), std::move(keys));
  }
  bool reads_few() const override { return true; }
  bool automatic() const override { return true; }
  bool learns(const IndexParams& params) const override {
    return params.code_training != CodeTraining::kOff;
  }

  absl::string_view effort_word() const override { return "rows scored exactly"; }
  int64_t DefaultEffort(const IndexParams&, int64_t top_k, int64_t) const override {
    return std::max<int64_t>(512, 4 * top_k);
  }

  double SearchNs(const IndexParams& params, const SearchResult& result, int64_t group,
                  int64_t zone_rows) const override {
    const auto scanned = static_cast<double>(group * zone_rows);
    return kAsCodeNs * params.code_bits / 128 * scanned +
           kAtRandomNs * (static_cast<double>(result.visited) - scanned);
  }
  int64_t BytesPerKey(const IndexParams& params, int64_t) const override {
    return params.code_bits / 8 + 1;
  }
  // The decoder, of hata twice; blocks are whole.
  int64_t FixedBytes(const IndexParams& params, int64_t head_dim) const override {
    const int64_t decoders = params.code_training == CodeTraining::kHata ? 2 : 1;
    return 4096 + decoders * 2 * params.code_bits * head_dim;
  }
  // What is kept beside the mapped blob.
  int64_t HeapBytes(int64_t blob_bytes) const override {
    return std::min(blob_bytes, kMaxCodeHeapBytes);
  }

 private:
  static constexpr double kAsCodeNs = 0.2;  // as kInOrderNs, of 128 bits

  static absl::string_view TrainingOf(const IndexParams& params) {
    return CodeTrainingName(params.code_training);
  }
};

}  // namespace

const IndexType& CodeIndexType() {
  static const CodeType type;
  return type;
}

}  // namespace carrel::kvstore
