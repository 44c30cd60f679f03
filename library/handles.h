// What:      what stands behind the classes of include/carrel: their one implementation each.
// Ownership: as there.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "carrel/model.h"
#include "carrel/store.h"
#include "library/loaded_model.h"
#include "library/store_access.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::library {

class ModelHandle final : public api::Model {
 public:
  explicit ModelHandle(std::shared_ptr<LoadedModel> loaded) : loaded_(std::move(loaded)) {}
  // Every Model is one.
  static const ModelHandle& Of(const Model& model) {
    return static_cast<const ModelHandle&>(model);
  }
  const std::shared_ptr<LoadedModel>& loaded() const { return loaded_; }

  ModelShape shape() const override;
  Result<std::vector<Token>> EncodeDocument(std::string_view text) const override;
  Result<std::vector<Token>> EncodePrompt(std::string_view text) const override;
  Result<std::string> Decode(std::span<const Token> tokens) const override;

 private:
  const std::shared_ptr<LoadedModel> loaded_;
};

class StoreHandle final : public api::Store {
 public:
  StoreHandle(StoreAddress address, std::shared_ptr<StoreAccess> access)
      : address_(std::move(address)), access_(std::move(access)) {}
  // Every Store is one.
  static StoreHandle& Of(Store& store) { return static_cast<StoreHandle&>(store); }
  const StoreAddress& address() const { return address_; }
  const std::shared_ptr<StoreAccess>& access() const { return access_; }

  Result<std::vector<ContextInfo>> List(std::vector<std::string>* unreadable) override;
  Result<ContextInfo> Get(const std::string& name) override;
  Status Delete(const std::string& name) override;
  Result<VerifyReport> Verify(const std::string& name, bool deep) override;
  Status Export(const std::string& name,
                const std::function<Status(std::string_view)>& sink) override;
  Result<ContextInfo> Import(
      const std::string& name,
      const std::function<Result<std::string_view>(int64_t offset)>& source) override;
  Result<std::vector<int32_t>> DocumentTokens(const std::string& name) override;

 private:
  const StoreAddress address_;
  const std::shared_ptr<StoreAccess> access_;
};

ContextInfo Describe(const v1::Manifest& manifest);

}  // namespace carrel::library
