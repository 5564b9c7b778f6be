// A load report as one page: its text, how the times are distributed, and how
// TTFT and the number of requests under way went over the run.

#ifndef CLI_LOAD_PLOT_H_
#define CLI_LOAD_PLOT_H_

#include <string>

#include "cli/load_report.h"

namespace cli {

// One SVG document that needs nothing else.
std::string LoadPlotSvg(const LoadReport& report);
// The same within an HTML page.
std::string LoadPlotHtml(const LoadReport& report);

}  // namespace cli

#endif  // CLI_LOAD_PLOT_H_
