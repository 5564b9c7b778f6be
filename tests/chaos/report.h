// Report: one JSON object a line into the file that FERRY_CHAOS_REPORT names, from which
// tools/reliability_report.py writes docs/reliability.md.

#ifndef TESTS_CHAOS_REPORT_H_
#define TESTS_CHAOS_REPORT_H_

#include <cstdint>
#include <string>

#include "tests/chaos/course.h"
#include "tests/chaos/gauges.h"
#include "tests/chaos/observer.h"

namespace chaos {

// A kind of fault (or an edge of the protocol), how often it was injected, and what the observer
// saw meanwhile.  Nothing is written where FERRY_CHAOS_REPORT is not set.
void Report(const std::string& suite, const std::string& fault, int64_t injected, uint64_t seed,
            const Tally& tally);
// What a process that lived through the soak held at its end, and how its memory grew in the second
// half.
void ReportFootprint(const std::string& process, const Footprint& last, const Growth& growth);

// The environment's value of a whole number, or `value`.
int64_t FromEnvironment(const char* name, int64_t value);

}  // namespace chaos

#endif  // TESTS_CHAOS_REPORT_H_
