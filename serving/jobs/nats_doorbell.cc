#include "serving/jobs/nats_doorbell.h"

#include <nats/nats.h>

#include <deque>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "common/checksum.h"
#include "common/shown.h"
#include "common/status.h"

namespace carrel::serving {
namespace {

constexpr int64_t kReconnectWaitMs = 2000;
constexpr int64_t kConnectMs = 2000;
constexpr int kForEver = -1;

struct Destroy {
  void operator()(natsOptions* options) const { natsOptions_Destroy(options); }
  void operator()(natsConnection* connection) const { natsConnection_Destroy(connection); }
  void operator()(natsSubscription* subscription) const { natsSubscription_Destroy(subscription); }
};

// Without who logs in.
std::string ShownAddress(absl::string_view url) {
  const size_t scheme = url.find("://"), at = url.rfind('@');
  if (scheme == absl::string_view::npos || at == absl::string_view::npos) return Shown(url);
  return absl::StrCat(url.substr(0, scheme + 3), Shown(url.substr(at + 1)));
}

// The library calls back on threads of its own, perhaps after the connection is gone: what it wakes lives as long
// as the process.
QuietDoorbell& NewForEver() {
  static auto& all = *new std::deque<QuietDoorbell>;
  static auto& mu = *new absl::Mutex;
  absl::MutexLock lock(&mu);
  return all.emplace_back();
}

class NatsDoorbell final : public Doorbell {
 public:
  NatsDoorbell(std::string shown, std::string subject)
      : shown_(std::move(shown)), subject_(std::move(subject)) {}
  ~NatsDoorbell() override {
    subscription_.reset();
    if (connection_ != nullptr) natsConnection_Close(connection_.get());
    connection_.reset();
  }

  absl::Status Begin(const std::string& url, const std::string& credentials, bool listen) {
    natsOptions* made = nullptr;
    RETURN_IF_ERROR(Check(natsOptions_Create(&made), "options"));
    options_.reset(made);
    RETURN_IF_ERROR(Check(natsOptions_SetURL(made, url.c_str()), "the address"));
    if (!credentials.empty()) {
      RETURN_IF_ERROR(
          Check(natsOptions_SetUserCredentialsFromFiles(made, credentials.c_str(), nullptr),
                "the credentials file"));
    }
    for (const natsStatus status :
         {natsOptions_SetName(made, "carrel"), natsOptions_SetTimeout(made, kConnectMs),
          natsOptions_SetMaxReconnect(made, kForEver),
          natsOptions_SetReconnectWait(made, kReconnectWaitMs),
          natsOptions_SetRetryOnFailedConnect(made, true, &OnConnected, &here_),
          natsOptions_SetReconnectedCB(made, &OnConnected, &here_)}) {
      RETURN_IF_ERROR(Check(status, "options"));
    }
    natsConnection* connection = nullptr;
    const natsStatus connected = natsConnection_Connect(&connection, made);
    connection_.reset(connection);
    if (connected != NATS_OK && connected != NATS_NOT_YET_CONNECTED) {
      return Check(connected, "connecting");
    }
    if (!listen) return absl::OkStatus();
    natsSubscription* subscription = nullptr;
    const natsStatus subscribed =
        natsConnection_Subscribe(&subscription, connection, subject_.c_str(), &OnRing, &here_);
    subscription_.reset(subscription);
    RETURN_IF_ERROR(Check(subscribed, "subscribing"));
    // What is rung from now on is heard. A server that goes meanwhile is told again when it is back.
    if (connected == NATS_OK) (void)natsConnection_FlushTimeout(connection, kConnectMs);
    return absl::OkStatus();
  }

  absl::Status Ring() override {
    RETURN_IF_ERROR(Check(natsConnection_PublishString(connection_.get(), subject_.c_str(), "work"),
                          "ringing"));
    return Check(natsConnection_FlushTimeout(connection_.get(), kConnectMs), "ringing");
  }
  void Wait(absl::Duration most) override { here_.Wait(most); }
  void Wake() override { here_.Wake(); }
  bool Hears() const override {
    return subscription_ != nullptr &&
           natsConnection_Status(connection_.get()) == NATS_CONN_STATUS_CONNECTED;
  }

 private:
  absl::Status Check(natsStatus status, absl::string_view what) const {
    if (status == NATS_OK) return absl::OkStatus();
    const std::string said = absl::StrCat(shown_, ": ", what, ": ", natsStatus_GetText(status));
    if (status == NATS_INVALID_ARG) return absl::InvalidArgumentError(said);
    return absl::UnavailableError(said);
  }
  // What was rung while nobody was connected is not known: look.
  static void OnConnected(natsConnection*, void* self) {
    static_cast<QuietDoorbell*>(self)->Wake();
  }
  static void OnRing(natsConnection*, natsSubscription*, natsMsg* message, void* self) {
    natsMsg_Destroy(message);
    static_cast<QuietDoorbell*>(self)->Wake();
  }

  const std::string shown_, subject_;
  QuietDoorbell& here_ = NewForEver();
  std::unique_ptr<natsOptions, Destroy> options_;
  std::unique_ptr<natsConnection, Destroy> connection_;
  std::unique_ptr<natsSubscription, Destroy> subscription_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Doorbell>> ConnectNats(const std::string& url,
                                                      const std::string& credentials,
                                                      const std::string& subject, bool listen) {
  absl::string_view rest = url;
  if ((!absl::ConsumePrefix(&rest, "nats://") && !absl::ConsumePrefix(&rest, "tls://")) ||
      rest.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", ShownAddress(url), "\" must be nats://HOST[:PORT] or tls://HOST[:PORT]"));
  }
  auto bell = std::make_unique<NatsDoorbell>(ShownAddress(url), subject);
  RETURN_IF_ERROR(bell->Begin(url, credentials, listen));
  return bell;
}

std::string SubjectOf(const std::string& uri) {
  return absl::StrCat("carrel.jobs.", Sha256Hex(absl::StripSuffix(uri, "/")).substr(0, 16));
}

}  // namespace carrel::serving
