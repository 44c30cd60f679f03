// What:   waits for a context that a residence brings.
#pragma once

#include <memory>
#include <string>

#include "absl/synchronization/notification.h"
#include "kvstore/replica/residence.h"

namespace carrel::kvstore {

inline absl::Status BringAndWait(Residence& residence, const std::string& name) {
  absl::Status ended;
  absl::Notification done;
  const std::shared_ptr<void> handle =
      residence.Bring(name, {.later = true, .done = [&](const absl::Status& status) {
                               ended = status;
                               done.Notify();
                             }});
  done.WaitForNotification();
  return ended;
}

}  // namespace carrel::kvstore
