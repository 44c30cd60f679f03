#include "tools/carrel/bucket_flags.h"

#include <CLI/CLI.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status.h"
#include "kvstore/remote/credentials_provider.h"

namespace carrel::tools {
namespace {

std::string FirstSet(std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    if (std::string value = kvstore::ProcessEnvironment(variable); !value.empty()) return value;
  }
  return "";
}

}  // namespace

void BucketFlags::Declare(CLI::App& command) {
  command.add_option("--s3-endpoint", endpoint,
                     "s3://: http[s]://HOST[:PORT] of the object store; or $AWS_ENDPOINT_URL_S3, "
                     "$AWS_ENDPOINT_URL; by default AWS's of the region");
  command.add_option("--s3-region", region,
                     "s3://: or $AWS_REGION, $AWS_DEFAULT_REGION; by default us-east-1");
  command.add_option("--s3-profile", profile,
                     "s3://: section of the shared credentials file; by default what "
                     "$AWS_ACCESS_KEY_ID, web identity, $AWS_PROFILE or instance metadata give");
  command.add_option("--s3-ca", ca, "s3://: authorities to trust, PEM; or $AWS_CA_BUNDLE");
  command
      .add_option("--s3-style", style,
                  "s3://: where the bucket's name stands: path (by default, with an endpoint) or "
                  "host (by default, without)")
      ->check(CLI::IsMember({"path", "host"}));
  command.add_option("--s3-encrypt", encrypt,
                     "s3://: what is stored is encrypted there: AES256, aws:kms or aws:kms:KEY; by "
                     "default as the bucket says");
}

void BucketFlags::DeclareForStore(CLI::App& command) {
  command.get_option("--store")->description(
      "folder of a store, opened in this process, or s3://BUCKET/PREFIX");
  Declare(command);
}

absl::StatusOr<std::unique_ptr<kvstore::Bucket>> BucketFlags::Open(
    const std::string& uri, const kvstore::RetryPolicy& retry,
    const std::atomic<bool>* stop) const {
  ASSIGN_OR_RETURN(const kvstore::BucketAddress address, kvstore::BucketAddress::Parse(uri));
  kvstore::S3Config config{.bucket = address.bucket};
  config.retry = retry;
  config.endpoint =
      endpoint.empty() ? FirstSet({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"}) : endpoint;
  const std::string set_region =
      region.empty() ? FirstSet({"AWS_REGION", "AWS_DEFAULT_REGION"}) : region;
  if (!set_region.empty()) config.region = set_region;
  config.ca_file = ca.empty() ? FirstSet({"AWS_CA_BUNDLE"}) : ca;
  config.path_style = style.empty() ? !config.endpoint.empty() : style == "path";
  const std::pair<std::string, std::string> key =
      absl::StrSplit(encrypt, absl::MaxSplits("aws:kms:", 1));
  config.encryption = key.second.empty() ? encrypt : "aws:kms";
  config.encryption_key = key.second;
  kvstore::CredentialsOptions credentials;
  credentials.profile = profile;
  credentials.region = config.region;
  credentials.ca_file = config.ca_file;
  ASSIGN_OR_RETURN(
      std::unique_ptr<kvstore::S3Client> client,
      kvstore::S3Client::Create(config, kvstore::DefaultCredentials(credentials), stop));
  return std::make_unique<kvstore::Bucket>(std::move(client), address.prefix);
}

absl::Status BucketFlags::RefuseWithoutBucket() const {
  const std::pair<const char*, const std::string*> flags[] = {
      {"--s3-endpoint", &endpoint}, {"--s3-region", &region},
      {"--s3-profile", &profile},   {"--s3-ca", &ca},
      {"--s3-style", &style},       {"--s3-encrypt", &encrypt}};
  for (const auto& [name, value] : flags) {
    if (value->empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " says something of a bucket: it needs --store s3://BUCKET/PREFIX"));
  }
  return absl::OkStatus();
}

}  // namespace carrel::tools
