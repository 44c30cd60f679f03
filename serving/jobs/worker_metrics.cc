#include "serving/jobs/worker_metrics.h"

namespace carrel::serving {
namespace {

MetricFamily One(MetricType type, const char* name, const char* help, double value) {
  return {.name = name, .help = help, .type = type, .samples = {{.value = value}}};
}

}  // namespace

std::vector<MetricFamily> WorkerMetrics(const WorkerStatistics& s) {
  const auto gauge = [](const char* name, const char* help, auto value) {
    return One(MetricType::kGauge, name, help, static_cast<double>(value));
  };
  const auto total = [](const char* name, const char* help, auto value) {
    return One(MetricType::kCounter, name, help, static_cast<double>(value));
  };
  return {gauge("carrel_worker_queue", "Open jobs of the bucket, at the last look.", s.queue),
          gauge("carrel_worker_queue_fitting", "Those of them that this worker's models can run.",
                s.fitting),
          gauge("carrel_worker_running", "Jobs that run here.", s.running ? 1 : 0),
          total("carrel_worker_jobs_taken_total", "Jobs whose lease this worker took.", s.taken),
          total("carrel_worker_jobs_done_total", "Jobs that ended with a context.", s.done),
          total("carrel_worker_jobs_found_total",
                "Jobs that had ended, or whose context was there, when they were taken.", s.found),
          total("carrel_worker_tries_failed_total", "Tries that ended with an error.", s.failed),
          total("carrel_worker_jobs_dead_total", "Jobs that were given up.", s.dead),
          total("carrel_worker_jobs_cancelled_total",
                "Jobs that were cancelled while they ran here.", s.cancelled),
          total("carrel_worker_leases_lost_total",
                "Jobs that another took over while they ran here.", s.lost),
          total("carrel_worker_jobs_given_back_total",
                "Jobs that were given back as this worker stopped.", s.given_back),
          total("carrel_worker_objects_refused_total", "Objects in the queue that were no job.",
                s.refused),
          total("carrel_worker_job_seconds_total", "That jobs took here, whatever became of them.",
                s.seconds)};
}

}  // namespace carrel::serving
