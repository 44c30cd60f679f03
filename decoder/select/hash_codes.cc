#include "decoder/select/hash_codes.h"

#include <cmath>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/bf16.h"
#include "common/status.h"

namespace carrel::decoder {

absl::StatusOr<HashSource> SourceOfCodes(const HashConfig& config, const HostRows* rows) {
  if (config.source != HashSource::kAuto) return config.source;
  if (rows == nullptr) return HashSource::kRandom;
  const absl::Status stored = rows->StoredCodes(Layer(0), KvHead(0)).status();
  if (absl::IsNotFound(stored)) return HashSource::kRandom;
  RETURN_IF_ERROR(Annotate(stored, "method=hash"));
  return HashSource::kStored;
}

absl::StatusOr<HeadCodes> StoredCodesOf(const HostRows& rows, Layer layer, KvHead head, int64_t d) {
  absl::StatusOr<HeadCodes> codes = rows.StoredCodes(layer, head);
  const std::string what =
      absl::StrCat("method=hash: layer ", layer.value(), " kv_head ", head.value());
  RETURN_IF_ERROR(Annotate(codes.status(), what));
  if (codes->bits < 32 || codes->bits % 32 != 0) {
    return absl::UnimplementedError(
        absl::StrCat(what, ": codes of ", codes->bits, " bits: must be a multiple of 32"));
  }
  if (static_cast<int64_t>(codes->words.size()) != rows.tokens() * codes->bits / 32 ||
      static_cast<int64_t>(codes->directions.size()) != codes->bits * d ||
      codes->decoder.size() != codes->directions.size()) {
    return absl::DataLossError(absl::StrCat(what, ": codes do not fit the context"));
  }
  return codes;
}

std::vector<float> RandomRotations(int64_t bits, int64_t d, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  std::vector<float> directions(static_cast<size_t>(bits * d));
  std::vector<double> basis;
  for (int64_t b = 0; b < bits; ++b) {
    if (b % d == 0) basis.clear();
    std::vector<double> x(static_cast<size_t>(d));
    for (double& value : x) value = normal(rng);
    for (size_t at = 0; at < basis.size(); at += x.size()) {  // Gram-Schmidt
      double dot = 0;
      for (size_t c = 0; c < x.size(); ++c) dot += x[c] * basis[at + c];
      for (size_t c = 0; c < x.size(); ++c) x[c] -= dot * basis[at + c];
    }
    double norm = 0;
    for (const double value : x) norm += value * value;
    norm = std::sqrt(norm);
    for (size_t c = 0; c < x.size(); ++c) {
      x[c] /= norm;
      directions[static_cast<size_t>(b) * x.size() + c] =
          Bf16ToFloat(FloatToBf16(static_cast<float>(x[c])));
    }
    basis.insert(basis.end(), x.begin(), x.end());
  }
  return directions;
}

std::vector<float> RotationDecoder(const std::vector<float>& directions,
                                   const std::vector<float>& threshold,
                                   const std::vector<float>& keys, int64_t d) {
  const auto width = static_cast<size_t>(d);
  const size_t bits = threshold.size(), samples = keys.size() / width;
  const double share = std::min(1.0, static_cast<double>(d) / static_cast<double>(bits));
  std::vector<float> decoder;
  decoder.reserve(directions.size());
  for (size_t b = 0; b < bits; ++b) {
    double sum = 0;
    for (size_t i = 0; i < samples; ++i) {
      float dot = 0;
      for (size_t c = 0; c < width; ++c) dot += directions[b * width + c] * keys[i * width + c];
      sum += std::abs(dot - threshold[b]);
    }
    const double spread = sum / static_cast<double>(std::max<size_t>(1, samples));
    for (size_t c = 0; c < width; ++c) {
      const double x = spread * share * directions[b * width + c];
      decoder.push_back(Bf16ToFloat(FloatToBf16(static_cast<float>(x))));
    }
  }
  return decoder;
}

}  // namespace carrel::decoder
