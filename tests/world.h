// What:   what tests across folders share: the demo model and its documents, contexts prefilled
//         from them, stores embedded or served.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/decoder.h"
#include "kvstore/index/index.h"
#include "model/checkpoint.h"

namespace carrel::testing_world {

ThreadPool* Pool();                         // for the process: one worker beside the caller
const model::Checkpoint& DemoCheckpoint();  // models/demo, loaded once
// The same in blocks of 8 bits: products of any number of tokens are alike (Backend::tokens_alike).
const model::Checkpoint& QuantizedCheckpoint();

// carrel::SharedFolder(), if goldens of the demo model lie there; else empty.
std::string SharedFolder();

// "registry-8k" and so on, from models/demo/docs or the shared folder (which keeps them packed);
// NotFound elsewhere.
absl::StatusOr<std::vector<TokenId>> DocumentTokens(const std::string& name);

struct Question {
  std::vector<TokenId> prompt;
  std::vector<TokenId> dense_ids;
};
absl::StatusOr<std::vector<Question>> Questions(const std::string& document);

absl::Status PrefillContext(const std::string& store_folder, const std::string& name,
                            const std::vector<TokenId>& tokens, const kvstore::IndexParams& index,
                            int64_t segment_tokens = 65536,
                            model::Device device = model::Device::kCpu,
                            const model::Checkpoint& checkpoint = DemoCheckpoint());

// The rows of `from` under another name, with an index of this kind.
absl::Status ReindexContext(const std::string& store_folder, const std::string& from,
                            const std::string& name, const kvstore::IndexParams& index);

// A decoder over an embedded store (StoreAccess), kept alive together.
// Puts something between a decoder and its store.
using StoreClientWrapper =
    std::function<std::unique_ptr<retrieval::Session>(std::unique_ptr<retrieval::Session> client)>;

class EmbeddedDecoder {
 public:
  static absl::StatusOr<std::unique_ptr<EmbeddedDecoder>> Open(
      const std::string& store_folder, const std::string& context,
      const decoder::RetrievalConfig& config,
      const decoder::DeviceConfig& device = decoder::DeviceConfig(),
      const StoreClientWrapper& wrap = nullptr,
      const model::Checkpoint& checkpoint = DemoCheckpoint());
  // The same over a server.
  static absl::StatusOr<std::unique_ptr<EmbeddedDecoder>> Connect(
      const std::string& address, const std::string& context,
      const decoder::RetrievalConfig& config);
  static absl::StatusOr<std::unique_ptr<EmbeddedDecoder>> ModelOnly(
      const decoder::DeviceConfig& device = decoder::DeviceConfig());
  ~EmbeddedDecoder();
  decoder::Decoder* operator->() { return decoder_.get(); }

 private:
  EmbeddedDecoder();
  struct Access;
  std::unique_ptr<Access> access_;
  std::unique_ptr<decoder::Decoder> decoder_;
};

// Greedy answers to all questions, in order.
absl::StatusOr<std::vector<std::vector<TokenId>>> AnswerAll(
    decoder::Decoder& decoder, const std::vector<Question>& questions,
    const decoder::GenerateOptions& options = decoder::GenerateOptions());

}  // namespace carrel::testing_world
