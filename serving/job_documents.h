// What:   Documents over a bucket: what clients bring becomes jobs (serving/jobs/job_follower.h), which workers prefill
//         into contexts for all replicas. Listing, recognition and answers are those of another Documents, over a store
//         that has the bucket's contexts.
// Errors: as documents.h. AlreadyExists, too: the bucket has another context of the name, or makes one. Unavailable the
//         bucket does not answer.
// Delete: a job is cancelled, wherever it runs; a context leaves the bucket, and then every store that has it from
//         there.
// Restart: jobs go on without this process. A job stays if its key is withdrawn while no process looks.
// Threads: any. Ownership: keeps what it is given; the scheduler outlives it.
#pragma once

#include <memory>
#include <string>

#include "library/loaded_model.h"
#include "serving/documents.h"
#include "serving/jobs/job_follower.h"
#include "serving/scheduler.h"

namespace carrel::serving {

struct JobDocumentsConfig {
  std::string model_name;  // as workers call it; they go by its fingerprint
  std::string index = "flat";
  int64_t max_queued = 16;  // jobs of the bucket that no worker has; one more is refused
};

std::unique_ptr<Documents> MakeJobDocuments(const JobDocumentsConfig& config,
                                            std::unique_ptr<Documents> contexts,
                                            std::shared_ptr<JobFollower> jobs,
                                            std::shared_ptr<library::LoadedModel> model,
                                            Scheduler* scheduler);

// A job as a document.
Document DocumentOf(const JobStatus& job);

}  // namespace carrel::serving
