#include "prefill/manifest_probe.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"

namespace carrel::prefill {

v1::WeightsProbe ProbeToProto(const model::WeightsProbe& probe) {
  v1::WeightsProbe stored;
  for (const model::WeightsProbe::Tensor& tensor : probe.tensors) {
    v1::WeightsProbe::Tensor& to = *stored.add_tensors();
    to.set_name(tensor.name);
    to.set_dtype(std::string(DTypeName(tensor.dtype)));
    to.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    to.mutable_runs()->Add(tensor.runs.begin(), tensor.runs.end());
    to.set_values(tensor.values);
  }
  for (const model::WeightsProbe::Token& token : probe.tokens) {
    v1::WeightsProbe::Token& to = *stored.add_tokens();
    to.set_id(static_cast<uint32_t>(token.id));
    to.set_text(token.text);
  }
  return stored;
}

absl::StatusOr<model::WeightsProbe> ProbeFromProto(const v1::WeightsProbe& stored) {
  model::WeightsProbe probe;
  for (const v1::WeightsProbe::Tensor& from : stored.tensors()) {
    constexpr DType kFloating[] = {DType::kF32, DType::kF16, DType::kBf16};
    const auto* dtype = std::find_if(std::begin(kFloating), std::end(kFloating),
                                     [&](DType d) { return DTypeName(d) == from.dtype(); });
    if (dtype == std::end(kFloating)) {
      return absl::DataLossError(absl::StrCat("the context's sampled weights: tensor \"",
                                              from.name(), "\" has the type \"", from.dtype(),
                                              "\", none of f32, f16, bf16"));
    }
    probe.tensors.push_back({from.name(),
                             *dtype,
                             {from.shape().begin(), from.shape().end()},
                             {from.runs().begin(), from.runs().end()},
                             from.values()});
  }
  for (const v1::WeightsProbe::Token& from : stored.tokens()) {
    probe.tokens.push_back({static_cast<TokenId>(from.id()), from.text()});
  }
  return probe;
}

}  // namespace carrel::prefill
