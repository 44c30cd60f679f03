#include "kvstore/format/sampled_queries.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvstore/format/little_endian.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kHeaderBytes = 16;

// Empty if the shape is one that can be stored; the bounds keep every product below 2^63.
std::string ShapeProblem(int64_t samples, int64_t group, int64_t head_dim) {
  if (samples < 0 || samples > kMaxSamples) {
    return absl::StrCat("sampled queries: samples=", samples, ", must be 0 .. ", kMaxSamples);
  }
  if (group < 1 || group > kMaxGroup) {
    return absl::StrCat("sampled queries: group=", group, ", must be 1 .. ", kMaxGroup);
  }
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    return absl::StrCat("sampled queries: head_dim=", head_dim, ", must be 1 .. ", kMaxHeadDim);
  }
  return "";
}

std::string PositionProblem(const std::vector<Position>& positions) {
  Position before = -1;
  for (const Position position : positions) {
    if (position <= before) {
      return absl::StrCat("sampled queries: position ", position, " follows ", before,
                          ", must ascend from 0");
    }
    before = position;
  }
  return "";
}

}  // namespace

absl::StatusOr<std::string> EncodeSampledQueries(const SampledQueries& sampled) {
  std::string problem = ShapeProblem(sampled.samples(), sampled.group, sampled.head_dim);
  if (problem.empty()) problem = PositionProblem(sampled.positions);
  if (!problem.empty()) return absl::InvalidArgumentError(problem);
  const int64_t floats = sampled.samples() * sampled.group * sampled.head_dim;
  if (static_cast<int64_t>(sampled.queries.size()) != floats) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampled queries: ", sampled.queries.size(), " floats, must be ", floats));
  }
  std::string out;
  out.reserve(static_cast<size_t>(kHeaderBytes + sampled.samples() * 8 + floats * 4));
  AppendLittleEndian(out, static_cast<uint32_t>(sampled.samples()));
  AppendLittleEndian(out, static_cast<uint32_t>(sampled.group));
  AppendLittleEndian(out, static_cast<uint32_t>(sampled.head_dim));
  AppendLittleEndian(out, uint32_t{0});
  for (const Position position : sampled.positions) AppendLittleEndian(out, int64_t{position});
  out.append(reinterpret_cast<const char*>(sampled.queries.data()),
             static_cast<size_t>(floats) * sizeof(float));
  return out;
}

absl::StatusOr<SampledQueries> DecodeSampledQueries(absl::string_view payload) {
  if (payload.size() < kHeaderBytes) {
    return absl::DataLossError(
        absl::StrCat("sampled queries: ", payload.size(), " bytes, header has ", kHeaderBytes));
  }
  const int64_t samples = LoadLittleEndian<uint32_t>(payload.data());
  SampledQueries sampled;
  sampled.group = LoadLittleEndian<uint32_t>(payload.data() + 4);
  sampled.head_dim = LoadLittleEndian<uint32_t>(payload.data() + 8);
  if (const uint32_t reserved = LoadLittleEndian<uint32_t>(payload.data() + 12); reserved != 0) {
    return absl::DataLossError(
        absl::StrCat("sampled queries: reserved field is ", reserved, ", must be 0"));
  }
  std::string problem = ShapeProblem(samples, sampled.group, sampled.head_dim);
  if (!problem.empty()) return absl::DataLossError(problem);
  const int64_t floats = samples * sampled.group * sampled.head_dim;
  const int64_t expected = kHeaderBytes + samples * 8 + floats * 4;
  if (static_cast<int64_t>(payload.size()) != expected) {
    return absl::DataLossError(absl::StrCat(
        "sampled queries: ", payload.size(), " bytes, must be ", expected, " for samples=", samples,
        " group=", sampled.group, " head_dim=", sampled.head_dim));
  }
  const char* at = payload.data() + kHeaderBytes;
  sampled.positions.resize(static_cast<size_t>(samples));
  sampled.queries.resize(static_cast<size_t>(floats));
  if (samples > 0) {
    std::memcpy(sampled.positions.data(), at, static_cast<size_t>(samples) * 8);
    std::memcpy(sampled.queries.data(), at + samples * 8, static_cast<size_t>(floats) * 4);
  }
  problem = PositionProblem(sampled.positions);
  if (!problem.empty()) return absl::DataLossError(problem);
  return sampled;
}

}  // namespace carrel::kvstore
