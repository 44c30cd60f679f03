// What:   a doorbell over NATS: who submits publishes on a subject, and workers that subscribe to it wake. Core
//         publish and subscribe: what nobody heard is found by looking (decision 099).
// Errors: of Connect: InvalidArgument a URL that is none of NATS's. A server that is not there is no error: the
//         connection is made, and made again, in the background, and Hears says how it stands. Of Ring: Unavailable.
//         No message holds the URL's user, password or token.
// Threads: any.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "serving/jobs/doorbell.h"

namespace carrel::serving {

// url: nats://[USER:PASSWORD@]HOST[:PORT] or tls://..; credentials: a NATS credentials file, or empty. subject: what
// all of one bucket share, see SubjectOf. listen: whether Wait hears rings.
absl::StatusOr<std::unique_ptr<Doorbell>> ConnectNats(const std::string& url,
                                                      const std::string& credentials,
                                                      const std::string& subject, bool listen);

// Of the jobs of s3://BUCKET/PREFIX: "carrel.jobs.DIGITS".
std::string SubjectOf(const std::string& uri);

}  // namespace carrel::serving
