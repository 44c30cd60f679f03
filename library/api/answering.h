// What: questions and answers of include/carrel as those of serving: what Reader and Engine share.
#pragma once

#include "absl/status/statusor.h"
#include "carrel/engine.h"
#include "library/store_access.h"
#include "model/tokenizer/seam.h"
#include "serving/engine.h"

namespace carrel::library {

// Of a store; InvalidArgument: an option.
absl::StatusOr<DecoderSpec> DecoderSpecOf(const ReaderOptions& options, const StoreAddress& store);

// options outlives the answer.
serving::AnswerJob JobOf(model::Seam prompt, const GenerateOptions& options,
                         const model::Checkpoint& checkpoint);

// Cancelled: on_text ended it.
absl::StatusOr<Reply> ReplyOf(absl::StatusOr<serving::AnswerJob::Done> done,
                              const model::Checkpoint& checkpoint);

}  // namespace carrel::library
