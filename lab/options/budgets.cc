#include <cmath>

#include "decoder/lab_options.h"

namespace carrel::decoder {
namespace {

// A row carries more of the mass where attention is peaked: rows are taken from the layers of high
// entropy. Of the exponents tried (docs/methods.md) this one raised the mass at every total.
constexpr double kEntropyScale = 4;

}  // namespace

std::vector<double> LabLayerShares(const RetrievalConfig& config, int32_t sparse_layers) {
  std::vector<double> shares;
  double sum = 0;
  for (int32_t i = 0; i < sparse_layers; ++i) {
    double share = 0.5 + static_cast<double>(i) / (sparse_layers - 1);
    if (config.budget == Budget::kMeasured) {
      const size_t layer = static_cast<size_t>(config.dense_layers) + static_cast<size_t>(i);
      share = std::exp(-config.layer_entropy_nats[layer] / kEntropyScale);
    } else if (sparse_layers == 1) {
      share = 1;
    }
    sum += share;
    shares.push_back(share);
  }
  for (double& share : shares) {
    if (config.budget == Budget::kMeasured) share = share / sum * sparse_layers;
  }
  return shares;
}

}  // namespace carrel::decoder
