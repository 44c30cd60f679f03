// carrel keys new | hash | check
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "kvstore/access/keys_file.h"
#include "tools/carrel/commands.h"

namespace carrel::tools {
namespace {

struct KeysFlags {
  std::string name, tenant, expires, file, out;
  std::vector<std::string> rights = {"list", "open"}, contexts;
  bool json = false;
};

// A new file that its owner alone reads.
absl::Status WriteSecret(const std::string& path, const std::string& key) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("--out ", path));
  const std::string line = key + "\n";
  const ssize_t written = write(fd, line.data(), line.size());
  const int error = written < 0 ? errno : ENOSPC;
  if (close(fd) == 0 && written == static_cast<ssize_t>(line.size())) return absl::OkStatus();
  unlink(path.c_str());
  return ErrnoStatus(error, absl::StrCat("--out ", path));
}

absl::Status RunNew(const KeysFlags& flags) {
  const std::string key = kvstore::NewAccessKey();
  nlohmann::ordered_json entry;
  entry["name"] = flags.name;
  entry["sha256"] = absl::BytesToHexString(kvstore::AccessKeySha256(key));
  entry["rights"] = flags.rights;
  if (!flags.contexts.empty()) entry["contexts"] = flags.contexts;
  if (!flags.expires.empty()) entry["expires"] = flags.expires;
  nlohmann::ordered_json tenants = nlohmann::ordered_json::array();
  if (!flags.tenant.empty()) {
    entry["tenant"] = flags.tenant;
    tenants.push_back({{"name", flags.tenant}, {"prefix", flags.tenant}});
  }
  // As a server will read it.
  nlohmann::ordered_json whole;
  whole["tenants"] = tenants;
  whole["keys"] = nlohmann::ordered_json::array({entry});
  RETURN_IF_ERROR(kvstore::ParseKeysFile(DumpJson(whole)).status());
  if (!flags.out.empty()) RETURN_IF_ERROR(WriteSecret(flags.out, key));
  if (flags.json) {
    const std::string& shown = flags.out.empty() ? key : flags.out;
    absl::PrintF("%s\n", DumpJson(nlohmann::ordered_json{
                             {flags.out.empty() ? "key" : "file", shown}, {"entry", entry}}));
    return absl::OkStatus();
  }
  if (flags.out.empty()) {
    absl::PrintF("%s\n", key);
    absl::FPrintF(
        stderr,
        "The line above is the key; it is stored nowhere. Keep it in a file of mode 0600, "
        "which --out FILE makes (--key-file, CARREL_KEY_FILE).\n");
  } else {
    absl::FPrintF(stderr, "The key is in %s (--key-file, CARREL_KEY_FILE), and nowhere else.\n",
                  flags.out);
  }
  absl::FPrintF(stderr, "Entry for \"keys\" of the server's keys file:\n%s\n", DumpJson(entry));
  return absl::OkStatus();
}

absl::Status RunHash(const KeysFlags& flags) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(flags.file));
  const absl::string_view key =
      absl::StripAsciiWhitespace(absl::string_view(text).substr(0, text.find('\n')));
  if (key.empty()) return absl::InvalidArgumentError("the first line holds no key");
  absl::PrintF("%s\n", absl::BytesToHexString(kvstore::AccessKeySha256(key)));
  return absl::OkStatus();
}

std::string IdentityText(const kvstore::Identity& identity) {
  if (identity.anonymous) return "anonymous";
  if (identity.uid.has_value()) return absl::StrCat("uid ", *identity.uid);
  if (!identity.certificate.empty()) return absl::StrCat("certificate ", identity.certificate);
  return identity.key_sha256.size() == 1 ? "key"
                                         : absl::StrCat(identity.key_sha256.size(), " keys");
}

absl::Status RunCheck(const KeysFlags& flags) {
  ASSIGN_OR_RETURN(const kvstore::KeysFile file, kvstore::ReadKeysFile(flags.file));
  absl::PrintF("%-20s %-28s %-30s %-12s %-20s %s\n", "NAME", "KNOWN BY", "RIGHTS", "TENANT",
               "EXPIRES", "CONTEXTS");
  for (const kvstore::AccessEntry& entry : file.entries) {
    const bool ends = entry.expires != absl::InfiniteFuture();
    absl::PrintF(
        "%-20s %-28s %-30s %-12s %-20s %s\n", entry.name, IdentityText(entry.identity),
        kvstore::RightNames(entry.rights), entry.tenant.empty() ? "-" : entry.tenant,
        ends ? absl::FormatTime("%Y-%m-%d %H:%M UTC", entry.expires, absl::UTCTimeZone()) : "never",
        absl::StrJoin(entry.contexts, " "));
  }
  return absl::OkStatus();
}

}  // namespace

void AddKeys(CLI::App& app, Run& chosen) {
  CLI::App& keys = *app.add_subcommand("keys", "Make and check keys for carrel serve --keys");
  keys.require_subcommand(1);
  auto flags = std::make_shared<KeysFlags>();
  CLI::App& fresh = *keys.add_subcommand(
      "new",
      "Make a key: it goes to standard output once, its entry for the keys file to standard error");
  fresh.add_option("name", flags->name, "what logs call it")->required();
  fresh.add_option("--rights", flags->rights, "list, open, import, delete, admin")->delimiter(',');
  fresh.add_option("--contexts", flags->contexts, "globs of names that it may see; default: all")
      ->delimiter(',');
  fresh.add_option("--tenant", flags->tenant, "tenant of the keys file that it belongs to");
  fresh.add_option("--expires", flags->expires, "such as 2027-01-31T00:00:00Z; default: never");
  fresh.add_option("--out", flags->out,
                   "new file of mode 0600 for the key, instead of standard output");
  fresh.add_flag("--json", flags->json, "key and entry as one JSON object on standard output");
  fresh.callback([flags, &chosen] { chosen = [flags] { return RunNew(*flags); }; });
  CLI::App& hash = *keys.add_subcommand("hash", "The SHA-256 of a key, as a keys file holds it");
  hash.add_option("file", flags->file, "file whose first line is the key; -: standard input")
      ->default_val("-");
  hash.callback([flags, &chosen] { chosen = [flags] { return RunHash(*flags); }; });
  CLI::App& check =
      *keys.add_subcommand("check", "Read a keys file as a server does, and show who may do what");
  check.add_option("file", flags->file, "the keys file")->required();
  check.callback([flags, &chosen] { chosen = [flags] { return RunCheck(*flags); }; });
}

}  // namespace carrel::tools
