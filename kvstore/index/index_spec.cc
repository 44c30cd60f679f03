#include "kvstore/index/index_spec.h"

#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "kvstore/index/index_type.h"

namespace carrel::kvstore {

void SetIndexSpec(const IndexParams& params, v1::IndexSpec& spec) {
  const IndexType& type = IndexTypeOf(params.kind);
  spec.set_kind(std::string(type.name()));
  if (type.exact()) return;
  spec.set_effort(static_cast<uint32_t>(params.effort));
  for (const IndexField& field : type.Fields(params)) {
    const auto* const descriptor = spec.GetDescriptor()->FindFieldByName(field.name);
    CARREL_CHECK(descriptor != nullptr);
    if (descriptor->enum_type() != nullptr) {
      spec.GetReflection()->SetEnumValue(&spec, descriptor, static_cast<int>(field.value));
    } else {
      spec.GetReflection()->SetUInt32(&spec, descriptor, static_cast<uint32_t>(field.value));
    }
  }
}

absl::StatusOr<IndexParams> IndexParamsOf(const v1::IndexSpec& spec) {
  IndexParams params;
  ASSIGN_OR_RETURN(params.kind, ParseIndexKind(spec.kind()));
  params.effort = static_cast<int32_t>(spec.effort());
  if (spec.m() != 0) params.m = static_cast<int32_t>(spec.m());
  if (spec.ef_construction() != 0) {
    params.ef_construction = static_cast<int32_t>(spec.ef_construction());
  }
  if (spec.code_bits() != 0) params.code_bits = static_cast<int32_t>(spec.code_bits());
  // Values that this program does not know become one that is refused.
  params.code_training = static_cast<CodeTraining>(
      v1::CodeTraining_IsValid(spec.code_training()) ? spec.code_training() : UINT8_MAX);
  params.code_scan =
      static_cast<CodeScan>(v1::CodeScan_IsValid(spec.code_scan()) ? spec.code_scan() : UINT8_MAX);
  params.ivf_lists = static_cast<int32_t>(spec.ivf_lists());
  RETURN_IF_ERROR(ValidateIndexParams(params));
  return params;
}

absl::StatusOr<std::vector<IndexParams>> HeadIndexParamsOf(const v1::Manifest& m) {
  const size_t heads = size_t{m.layers()} * m.kv_heads();
  if (m.index().kind() != kAutoIndexKind) {
    ASSIGN_OR_RETURN(const IndexParams params, IndexParamsOf(m.index()));
    return std::vector<IndexParams>(heads, params);
  }
  std::vector<IndexParams> params(heads);
  std::vector<bool> seen(heads);
  for (const v1::HeadIndex& head : m.head_indexes()) {
    const size_t at = size_t{head.layer()} * m.kv_heads() + head.kv_head();
    if (head.layer() >= m.layers() || head.kv_head() >= m.kv_heads() || seen[at]) {
      return absl::DataLossError(absl::StrCat("head_indexes name layer=", head.layer(),
                                              " kv_head=", head.kv_head(), " wrongly or twice"));
    }
    seen[at] = true;
    ASSIGN_OR_RETURN(params[at], IndexParamsOf(head.index()));
  }
  if (static_cast<size_t>(m.head_indexes_size()) == heads) return params;
  return absl::DataLossError(
      absl::StrCat("head_indexes are ", m.head_indexes_size(), " instead of ", heads));
}

}  // namespace carrel::kvstore
