// What:   documents of which those that clients bring become jobs of a bucket (serving/jobs/job_follower.h), which workers
//         prefill; and then everybody's. What is listed, recognised and answered from is another Documents', of a store
//         that has the bucket's contexts.
// Errors: as documents.h. AlreadyExists, too: the bucket has another context of the name, or makes one. Unavailable the
//         bucket does not answer.
// Delete: a job is cancelled, wherever it runs; a context leaves the bucket, and then every store that has it from
//         there.
// Restart: jobs go on without us. Whose key is withdrawn while we are not there keeps his job.
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
  int64_t max_queued = 16;  // jobs of the bucket that nobody works on; one more is refused
};

std::unique_ptr<Documents> MakeJobDocuments(const JobDocumentsConfig& config,
                                            std::unique_ptr<Documents> contexts,
                                            std::shared_ptr<JobFollower> jobs,
                                            std::shared_ptr<library::LoadedModel> model,
                                            Scheduler* scheduler);

// A job as a document.
Document DocumentOf(const JobStatus& job);

}  // namespace carrel::serving
