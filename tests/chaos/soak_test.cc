// A long run at 80 % of what the system can do, with a fault every ten seconds: nothing is lost or
// wrong, and the processes that live through it neither grow nor gather descriptors or threads.
// FERRY_SOAK_MINUTES sets its length, FERRY_SOAK_CSV names a file for its course
// (tools/plot_soak.py draws it).

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/chaos/course.h"
#include "tests/chaos/faults.h"
#include "tests/chaos/report.h"

namespace chaos {
namespace {

constexpr int kNumClients = 16;
constexpr int64_t kWarmUpRequests = 10000;
constexpr absl::Duration kWarmUpLimit = absl::Minutes(3);
constexpr absl::Duration kMeasure = absl::Seconds(20);
constexpr absl::Duration kBetweenFaults = absl::Seconds(10);
constexpr double kLoad = 0.8;
constexpr double kMaxGrowthPerHour = 0.01;
constexpr absl::Duration kReturnLimit = absl::Seconds(60);

// Sixteen clients that together ask `rate` times a second, at random moments, whatever the answers
// do: an open loop as long as a client is free.
class OpenLoop {
 public:
  OpenLoop(Observer& observer, const std::vector<Question>& questions, double rate, uint64_t seed) {
    for (int c = 0; c < kNumClients; ++c) {
      clients_.emplace_back([this, &observer, &questions, rate, seed = seed + c] {
        std::mt19937_64 random(seed);
        std::exponential_distribution<double> gap(rate / kNumClients);
        absl::Time next = absl::Now();
        while (true) {
          next = std::max(next + absl::Seconds(gap(random)), absl::Now() - absl::Seconds(1));
          std::unique_lock lock(mutex_);
          if (changed_.wait_for(lock, absl::ToChronoNanoseconds(next - absl::Now()),
                                [this] { return over_; })) {
            return;
          }
          lock.unlock();
          observer.Ask(questions[random() % questions.size()], {});
        }
      });
    }
  }
  ~OpenLoop() {
    {
      std::lock_guard lock(mutex_);
      over_ = true;
      changed_.notify_all();
    }
    for (std::thread& client : clients_) client.join();
  }

 private:
  std::mutex mutex_;  // guards over_
  std::condition_variable changed_;
  bool over_ = false;
  std::vector<std::thread> clients_;
};

TEST(SoakTest, MemoryAndDescriptorsStayFlat) {
  const auto seed = static_cast<uint64_t>(FromEnvironment("FERRY_CHAOS_SEED", 1));
  const absl::Duration length = absl::Minutes(FromEnvironment("FERRY_SOAK_MINUTES", 30));
  StageOptions options;
  options.model_dir = std::getenv("FERRY_DEMO_MODEL");
  integration::SingleEngine oracle(options.model_dir);
  const std::vector<Question> questions = MixedQuestions(oracle);
  Stage stage(options);
  // Workers remember the last 4096 requests: until they know as many, they grow.
  const std::vector<Question> small = {
      MakeQuestion(oracle, {integration::MakePrompt(50, 1, 400), 1, 0})};
  stage.Busy(small, kNumClients, 0);
  stage.Let(kWarmUpRequests, kWarmUpLimit);
  stage.Calm();
  stage.Busy(questions, kNumClients, 0);
  // Memory that a process has touched stays its own: what each fault can make of it comes before
  // the measurement.
  std::mt19937_64 random(seed);
  Tally tally;
  int64_t num_faults = 0;
  for (const Fault& fault : LastingFaults()) {
    fault.inject(stage, random);
    ++num_faults;
    ASSERT_EQ(stage.Repair(), "") << fault.name;
  }
  tally.Add(stage.observer().Take());
  const absl::Time start_of_measure = absl::Now();
  stage.Let(1 << 30, kMeasure);
  const Tally measured = stage.observer().Take();
  tally.Add(measured);
  const double rate = kLoad * static_cast<double>(measured.requests) /
                      absl::ToDoubleSeconds(absl::Now() - start_of_measure);
  stage.Calm();
  ASSERT_EQ(stage.system().WaitUntilIdle(kReturnLimit), "");
  Gauges gauges(stage.system());
  std::printf("%.1f requests a second for %s\n", rate, absl::FormatDuration(length).c_str());

  // These live through it: what kills a process takes the second one of its kind.
  std::vector<Course> courses = {
      {.name = "router", .pid = stage.system().router().pid(), .points = {}},
      {.name = "prefill", .pid = stage.system().prefill(0).process.pid(), .points = {}},
      {.name = "decode", .pid = stage.system().decode(0).process.pid(), .points = {}}};
  const char* const csv = std::getenv("FERRY_SOAK_CSV");
  std::ofstream file(csv == nullptr ? "/dev/null" : csv);
  file << "seconds,process,resident_bytes,descriptors,threads\n";
  const absl::Time start = absl::Now();
  {
    const OpenLoop load(stage.observer(), questions, rate, seed);
    while (absl::Now() - start < length && !::testing::Test::HasFailure()) {
      const absl::Time next = absl::Now() + kBetweenFaults;
      const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
      for (Course& course : courses) {
        const Footprint now = FootprintOf(course.pid);
        course.points.push_back({.seconds = seconds, .footprint = now});
        file << absl::StrCat(seconds, ",", course.name, ",", now.resident_bytes, ",",
                             now.descriptors, ",", now.threads, "\n");
      }
      const std::vector<Fault>& faults = LastingFaults();
      faults[random() % faults.size()].inject(stage, random);
      ++num_faults;
      EXPECT_EQ(stage.Repair(), "");
      tally.Add(stage.observer().Take());
      stage.Let(1 << 30, next - absl::Now());
    }
  }
  tally.Add(stage.observer().Take());
  for (const std::string& what : tally.faults_found) ADD_FAILURE() << what;
  EXPECT_EQ(tally.lost + tally.wrong + tally.late, 0);
  EXPECT_EQ(gauges.WaitUntilBack(kReturnLimit), "");
  for (const Course& course : courses) {
    const Growth growth = course.MemoryGrowth();
    const Footprint& last = course.points.back().footprint;
    std::printf("%s: memory %+.2f +- %.2f %% an hour, %d descriptors, %d threads\n",
                course.name.c_str(), 100 * growth.per_hour, 100 * growth.error, last.descriptors,
                last.threads);
    ReportFootprint(course.name, last, growth);
    EXPECT_FALSE(growth.IsBeyond(kMaxGrowthPerHour)) << course.name;
  }
  Report("soak", absl::StrCat("soak of ", absl::FormatDuration(length)), num_faults, seed, tally);
}

}  // namespace
}  // namespace chaos
