#include "kvstore/access/keys_file.h"

#include <sys/stat.h>

#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/json.h"
#include "common/secret.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace carrel::kvstore {
namespace {

using Json = nlohmann::json;

constexpr size_t kMostEntries = 65536;
constexpr int64_t kMostBytes = int64_t{16} << 20;
constexpr size_t kLongestName = 128;

// One object of the file, read field by field: what is not read is refused.
class Fields {
 public:
  Fields(std::string where, const Json& object) : where_(std::move(where)), object_(object) {}

  absl::Status Refuse(absl::string_view field, absl::string_view why) const {
    return absl::InvalidArgumentError(absl::StrCat(where_, ": \"", field, "\" ", why));
  }
  bool Has(const char* field) const { return object_.contains(field); }

  absl::Status Text(const char* field, std::string& to) {
    known_.insert(field);
    if (!Has(field)) return absl::OkStatus();
    if (!object_[field].is_string()) return Refuse(field, "is no string");
    to = object_[field].get<std::string>();
    if (to.size() > kLongestName) {
      return Refuse(field, absl::StrCat("has ", to.size(), " bytes, at most ", kLongestName));
    }
    for (const char c : to) {
      if (static_cast<uint8_t>(c) < 0x20 || c == 0x7f)
        return Refuse(field, "holds a control character");
    }
    return absl::OkStatus();
  }
  absl::Status Name(const char* field, std::string& to) {
    RETURN_IF_ERROR(Text(field, to));
    return to.empty() ? Refuse(field, "is missing or empty") : absl::OkStatus();
  }
  absl::Status Count(const char* field, int64_t& to, int64_t most = int64_t{1} << 62) {
    known_.insert(field);
    if (!Has(field)) return absl::OkStatus();
    const Json& value = object_[field];
    if (!value.is_number_integer() || value < 0 || value > most) {
      return Refuse(field, absl::StrCat("is no whole number in 0 .. ", most));
    }
    to = value.get<int64_t>();
    return absl::OkStatus();
  }
  absl::Status Rate(const char* field, double& to) {
    known_.insert(field);
    if (!Has(field)) return absl::OkStatus();
    if (!object_[field].is_number() || !(object_[field] > 0) || !(object_[field] <= 1e15)) {
      return Refuse(field,
                    "is no number above 0, and at most 1e15; without the field there is no bound");
    }
    to = object_[field].get<double>();
    return absl::OkStatus();
  }
  absl::Status Flag(const char* field, bool& to) {
    known_.insert(field);
    if (!Has(field)) return absl::OkStatus();
    if (!object_[field].is_boolean()) return Refuse(field, "is neither true nor false");
    to = object_[field].get<bool>();
    return absl::OkStatus();
  }
  // A list of strings; one string alone is a list of one.
  absl::Status Texts(const char* field, std::vector<std::string>& to) {
    known_.insert(field);
    if (!Has(field)) return absl::OkStatus();
    to.clear();
    const Json list = object_[field].is_array() ? object_[field] : Json::array({object_[field]});
    for (const Json& value : list) {
      if (!value.is_string()) return Refuse(field, "is no list of strings");
      to.push_back(value.get<std::string>());
      if (to.back().size() > 2 * kLongestName)
        return Refuse(field, "holds a string that is too long");
    }
    return to.empty() ? Refuse(field, "is empty") : absl::OkStatus();
  }
  absl::Status NothingElse() const {
    for (const auto& [field, value] : object_.items()) {
      if (!known_.contains(field)) {
        return Refuse(field.substr(0, kLongestName),
                      absl::StrCat("is unknown, expected ", absl::StrJoin(known_, ", ")));
      }
    }
    return absl::OkStatus();
  }

 private:
  const std::string where_;
  const Json& object_;
  std::set<std::string> known_;
};

absl::Status ReadIdentity(Fields& fields, Identity& identity) {
  std::vector<std::string> hashes;
  RETURN_IF_ERROR(fields.Texts("sha256", hashes));
  for (const std::string& hex : hashes) {
    if (hex.size() != 64 || hex.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
      return fields.Refuse("sha256", "is not 64 hexadecimal digits (see carrel keys hash)");
    }
    identity.key_sha256.push_back(absl::HexStringToBytes(hex));
  }
  RETURN_IF_ERROR(fields.Text("certificate", identity.certificate));
  int64_t uid = -1;
  RETURN_IF_ERROR(fields.Count("uid", uid, int64_t{0xfffffffe}));
  if (uid >= 0) identity.uid = static_cast<uint32_t>(uid);
  RETURN_IF_ERROR(fields.Flag("anonymous", identity.anonymous));
  const int given = !identity.key_sha256.empty() + !identity.certificate.empty() +
                    identity.uid.has_value() + identity.anonymous;
  if (given != 1) {
    return fields.Refuse("sha256",
                         "or \"certificate\", \"uid\", or \"anonymous\": true: exactly "
                         "one says who this is");
  }
  return absl::OkStatus();
}

absl::Status ReadRights(Fields& fields, Rights& rights) {
  std::vector<std::string> names;
  RETURN_IF_ERROR(fields.Texts("rights", names));
  if (names.empty()) return fields.Refuse("rights", "is missing");
  for (const std::string& name : names) {
    const absl::StatusOr<Right> right = ParseRight(name);
    if (!right.ok()) return fields.Refuse("rights", right.status().message());
    rights.Add(*right);
  }
  return absl::OkStatus();
}

absl::StatusOr<AccessEntry> ReadEntry(Fields fields) {
  AccessEntry entry;
  RETURN_IF_ERROR(fields.Name("name", entry.name));
  RETURN_IF_ERROR(ReadIdentity(fields, entry.identity));
  RETURN_IF_ERROR(ReadRights(fields, entry.rights));
  RETURN_IF_ERROR(fields.Texts("contexts", entry.contexts));
  RETURN_IF_ERROR(fields.Text("tenant", entry.tenant));
  RETURN_IF_ERROR(fields.Count("sessions", entry.limits.sessions));
  RETURN_IF_ERROR(fields.Rate("requests_per_second", entry.limits.requests_per_s));
  RETURN_IF_ERROR(fields.Rate("bytes_per_second", entry.limits.bytes_per_s));
  std::string expires, error;
  RETURN_IF_ERROR(fields.Text("expires", expires));
  if (!expires.empty() && !absl::ParseTime(absl::RFC3339_full, expires, &entry.expires, &error)) {
    return fields.Refuse("expires", "is no time such as 2027-01-31T00:00:00Z");
  }
  RETURN_IF_ERROR(fields.NothingElse());
  return entry;
}

absl::StatusOr<Tenant> ReadTenant(Fields fields) {
  Tenant tenant;
  RETURN_IF_ERROR(fields.Name("name", tenant.name));
  RETURN_IF_ERROR(fields.Name("prefix", tenant.prefix));
  RETURN_IF_ERROR(fields.Count("bytes", tenant.max_bytes));
  RETURN_IF_ERROR(fields.Count("contexts", tenant.max_contexts));
  RETURN_IF_ERROR(fields.Count("sessions", tenant.max_sessions));
  RETURN_IF_ERROR(fields.NothingElse());
  return tenant;
}

absl::Status CheckTenants(const std::vector<Tenant>& tenants) {
  for (size_t i = 0; i < tenants.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const Tenant &a = tenants[j], &b = tenants[i];
      if (a.name == b.name) {
        return absl::InvalidArgumentError(absl::StrCat("tenant \"", a.name, "\" is there twice"));
      }
      if (absl::StartsWith(a.prefix, b.prefix) || absl::StartsWith(b.prefix, a.prefix)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "tenants \"", a.name, "\" and \"", b.name, "\": one's prefix begins the other's (\"",
            a.prefix, "\", \"", b.prefix, "\"): they would share contexts"));
      }
    }
  }
  return absl::OkStatus();
}

// Names are unique, an identity leads to one entry, tenants exist.
absl::Status CheckEntries(const KeysFile& file) {
  std::set<std::string> names, identities, tenants;
  for (const Tenant& tenant : file.tenants) tenants.insert(tenant.name);
  for (const AccessEntry& entry : file.entries) {
    const std::string what = absl::StrCat("key \"", entry.name, "\"");
    if (!names.insert(entry.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(what, " is there twice"));
    }
    if (!entry.tenant.empty() && !tenants.contains(entry.tenant)) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": there is no tenant \"", entry.tenant, "\""));
    }
    std::vector<std::string> own;
    for (const std::string& hash : entry.identity.key_sha256) own.push_back("key " + hash);
    if (!entry.identity.certificate.empty())
      own.push_back("certificate " + entry.identity.certificate);
    if (entry.identity.uid.has_value()) own.push_back(absl::StrCat("uid ", *entry.identity.uid));
    if (entry.identity.anonymous) own.push_back("anonymous");
    for (const std::string& identity : own) {
      if (!identities.insert(identity).second) {
        return absl::InvalidArgumentError(
            absl::StrCat(what, ": another entry has the same identity"));
      }
    }
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status ReadList(const Json& root, const char* field, const char* one,
                      absl::StatusOr<T> (*read)(Fields), std::vector<T>& to) {
  if (!root.contains(field)) return absl::OkStatus();
  if (!root[field].is_array() || root[field].size() > kMostEntries) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", field, "\" is no list of at most ", kMostEntries, " objects"));
  }
  for (const Json& object : root[field]) {
    std::string where = absl::StrCat(one, " ", to.size() + 1);
    if (!object.is_object())
      return absl::InvalidArgumentError(absl::StrCat(where, " is no object"));
    if (object.contains("name") && object["name"].is_string()) {
      absl::StrAppend(&where, " (",
                      absl::CHexEscape(object["name"].get<std::string>().substr(0, kLongestName)),
                      ")");
    }
    ASSIGN_OR_RETURN(to.emplace_back(), read(Fields(where, object)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<KeysFile> ParseKeysFile(absl::string_view text) {
  ASSIGN_OR_RETURN(const Json root, ParseJsonObject(text, "keys file", {.bytes = kMostBytes}));
  for (const auto& [field, value] : root.items()) {
    if (field != "keys" && field != "tenants") {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", absl::CHexEscape(field.substr(0, kLongestName)),
                       "\" is unknown, expected keys, tenants"));
    }
  }
  KeysFile file;
  RETURN_IF_ERROR(ReadList(root, "tenants", "tenant", ReadTenant, file.tenants));
  RETURN_IF_ERROR(ReadList(root, "keys", "key", ReadEntry, file.entries));
  RETURN_IF_ERROR(CheckTenants(file.tenants));
  RETURN_IF_ERROR(CheckEntries(file));
  return file;
}

absl::StatusOr<KeysFile> ReadKeysFile(const std::string& path) {
  const std::string what = absl::StrCat("keys file ", path);
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return ErrnoStatus(errno, what);
  if ((info.st_mode & S_IWOTH) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: everybody may write it (mode %04o): whoever can, decides who may do what", what,
        info.st_mode & 0777));
  }
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  absl::StatusOr<KeysFile> file = ParseKeysFile(text);
  if (!file.ok()) return Annotate(file.status(), what);
  return file;
}

bool MatchesGlob(absl::string_view glob, absl::string_view name) {
  // Where to go on after the last *, should what follows it not match here.
  size_t g = 0, n = 0, star = absl::string_view::npos, resume = 0;
  while (n < name.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      resume = n;
    } else if (g < glob.size() && (glob[g] == '?' || glob[g] == name[n])) {
      ++g;
      ++n;
    } else if (star != absl::string_view::npos) {
      g = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

std::string NewAccessKey() {
  std::string key = absl::WebSafeBase64Escape(RandomBytes(32));  // 43 characters, no padding
  return absl::StrCat("carrel_", key);
}

std::string AccessKeySha256(absl::string_view key) {
  Sha256 hash;
  hash.Update(key);
  const std::array<uint8_t, 32> digest = hash.Finish();
  return std::string(digest.begin(), digest.end());
}

}  // namespace carrel::kvstore
