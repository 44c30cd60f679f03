// In place of lab/training: IndexType::CheckBuild refuses before this is asked for.
#include "common/status.h"
#include "kvstore/index/code/hash_training.h"

namespace carrel::kvstore {

Floats TrainHash(const HashTrainingConfig&, const Rows&, const Floats&, const SampledQueries&) {
  CARREL_CHECK(false);
}

}  // namespace carrel::kvstore
