#include "cli/load_plot.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "cli/latency_stats.h"

namespace cli {
namespace {

constexpr double kPageWidth = 960;
constexpr double kPanelWidth = 400;
constexpr double kPanelHeight = 200;
constexpr double kLeft = 60;  // of a panel within its half of the page
constexpr double kLineHeight = 18;
constexpr size_t kMaxPoints = 2000;  // more are not to be told apart

using Point = std::pair<double, double>;

std::string Escape(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

std::string Label(double x, double y, const std::string& anchor, const std::string& text) {
  return absl::StrFormat(
      "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" xml:space=\"preserve\">%s</text>\n", x, y,
      anchor, Escape(text));
}

// The smallest number not less whose quarters are short to write.
double RoundUp(double value) {
  if (value <= 0) return 1;
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 1.2, 1.6, 2.0, 2.4, 3.0, 4.0, 5.0, 6.0, 8.0}) {
    if (value <= factor * power) return factor * power;
  }
  return 10 * power;
}

// Axes with their numbers; maps values to places.
struct Panel {
  double x = 0;
  double y = 0;
  double max_x = 1;
  double max_y = 1;

  double PlaceX(double value) const { return x + kPanelWidth * value / max_x; }
  double PlaceY(double value) const { return y + kPanelHeight * (1 - value / max_y); }

  std::string Axes(const std::string& title, const std::string& x_unit) const {
    std::string svg = Label(x, y - 10, "start", title);
    absl::StrAppendFormat(
        &svg, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.0f\" height=\"%.0f\" class=\"frame\"/>\n", x,
        y, kPanelWidth, kPanelHeight);
    for (int i = 0; i <= 4; ++i) {
      const double share = i / 4.0;
      absl::StrAppend(
          &svg,
          Label(PlaceX(share * max_x), y + kPanelHeight + 16, "middle",
                absl::StrFormat("%g", share * max_x)),
          Label(x - 6, PlaceY(share * max_y) + 4, "end", absl::StrFormat("%g", share * max_y)));
    }
    return absl::StrCat(svg, Label(x + kPanelWidth, y + kPanelHeight + 32, "end", x_unit));
  }
};

std::vector<double> Thinned(const std::vector<double>& sorted) {
  if (sorted.size() <= kMaxPoints) return sorted;
  std::vector<double> some;
  for (size_t i = 1; i <= kMaxPoints; ++i)
    some.push_back(Percentile(sorted, static_cast<double>(i) / kMaxPoints));
  return some;
}

// The share of values that are at most so large, in percent.
std::string Distribution(Panel panel, const std::string& title, std::vector<double> values) {
  std::sort(values.begin(), values.end());
  panel.max_x = RoundUp(values.empty() ? 1 : values.back());
  panel.max_y = 100;
  std::string svg =
      panel.Axes(absl::StrCat(title, ": % of ", values.size(), " at most so long"), "ms");
  if (values.empty()) return svg;
  const std::vector<double> points = Thinned(values);
  absl::StrAppend(&svg, "<polyline class=\"line\" points=\"");
  for (size_t i = 0; i < points.size(); ++i) {
    const double x = panel.PlaceX(points[i]);
    const auto count = static_cast<double>(points.size());
    absl::StrAppendFormat(&svg, "%.1f,%.1f %.1f,%.1f ", x,
                          panel.PlaceY(100 * static_cast<double>(i) / count), x,
                          panel.PlaceY(100 * static_cast<double>(i + 1) / count));
  }
  absl::StrAppend(&svg, "\"/>\n");
  double below = 16;
  for (const auto& [name, share] :
       {std::pair{"median", 0.5}, std::pair{"p90", 0.9}, std::pair{"p99", 0.99}}) {
    const double value = Percentile(values, share);
    absl::StrAppendFormat(&svg, "<circle class=\"mark\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>\n",
                          panel.PlaceX(value), panel.PlaceY(100 * share));
    absl::StrAppend(&svg, Label(panel.x + kPanelWidth - 6, panel.y + kPanelHeight - 60 + below,
                                "end", absl::StrFormat("%s %.2f ms", name, value)));
    below += 16;
  }
  return svg;
}

std::string OverTime(Panel panel, const LoadReport& report) {
  std::vector<Point> points;
  for (const MeasuredRequest& one : report.good) points.emplace_back(one.due_ms / 1e3, one.ttft_ms);
  if (points.size() > kMaxPoints) {
    std::vector<Point> some;
    for (size_t i = 0; i < kMaxPoints; ++i) some.push_back(points[i * points.size() / kMaxPoints]);
    points = std::move(some);
  }
  double last = 0, longest = 0;
  for (const auto& [x, y] : points) {
    last = std::max(last, x);
    longest = std::max(longest, y);
  }
  panel.max_x = RoundUp(last);
  panel.max_y = RoundUp(longest);
  std::string svg = panel.Axes("TTFT ms by when the request was due", "s");
  for (const auto& [x, y] : points) {
    absl::StrAppendFormat(&svg, "<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"2\"/>\n",
                          panel.PlaceX(x), panel.PlaceY(y));
  }
  return svg;
}

// How many requests were due and not yet answered, at each moment.
std::string UnderWay(Panel panel, const LoadReport& report) {
  std::vector<std::pair<double, int>> changes;
  for (const MeasuredRequest& one : report.good) {
    changes.emplace_back(one.due_ms / 1e3, 1);
    changes.emplace_back((one.due_ms + one.e2e_ms) / 1e3, -1);
  }
  std::sort(changes.begin(), changes.end());
  std::vector<Point> points = {{0, 0}};
  double highest = 0;
  for (const auto& [at, change] : changes) {
    points.emplace_back(at, points.back().second + change);
    highest = std::max(highest, points.back().second);
  }
  panel.max_x = RoundUp(points.back().first);
  panel.max_y = RoundUp(highest);
  std::string svg =
      absl::StrCat(panel.Axes("requests under way", "s"), "<polyline class=\"line\" points=\"");
  double last = 0;
  for (const auto& [at, count] : points) {
    absl::StrAppendFormat(&svg, "%.1f,%.1f %.1f,%.1f ", panel.PlaceX(at), panel.PlaceY(last),
                          panel.PlaceX(at), panel.PlaceY(count));
    last = count;
  }
  return absl::StrCat(svg, "\"/>\n");
}

}  // namespace

std::string LoadPlotSvg(const LoadReport& report) {
  const std::vector<std::string> lines = absl::StrSplit(report.Text(), '\n', absl::SkipEmpty());
  const double text_height = 30 + kLineHeight * static_cast<double>(lines.size());
  const double row_height = kPanelHeight + 80;
  const double height = text_height + 3 * row_height;
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" "
      "font-family=\"monospace\" font-size=\"12\">\n"
      "<style>.frame{fill:none;stroke:#999}.line{fill:none;stroke:#1f5fa8;stroke-width:1.5}.mark{"
      "fill:#c0392b}"
      ".dot{fill:#1f5fa8;fill-opacity:.5}</style>\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
      kPageWidth, height);
  double y = 30;
  for (const std::string& line : lines) {
    absl::StrAppend(&svg, Label(20, y, "start", line));
    y += kLineHeight;
  }
  const auto panel = [&](int row, int column) {
    return Panel{.x = kLeft + column * kPageWidth / 2, .y = text_height + row * row_height + 30};
  };
  absl::StrAppend(&svg, Distribution(panel(0, 0), "TTFT", report.Values(&MeasuredRequest::ttft_ms)),
                  Distribution(panel(0, 1), "TPOT", report.Values(&MeasuredRequest::tpot_ms)),
                  Distribution(panel(1, 0), "ITL", report.InterTokenTimes()),
                  Distribution(panel(1, 1), "E2E", report.Values(&MeasuredRequest::e2e_ms)),
                  OverTime(panel(2, 0), report), UnderWay(panel(2, 1), report));
  return absl::StrCat(svg, "</svg>\n");
}

std::string LoadPlotHtml(const LoadReport& report) {
  return absl::StrCat(
      "<!doctype html>\n<meta charset=\"utf-8\">\n<title>ferry bench: ", Escape(report.model),
      "</title>\n<body style=\"max-width:1100px;margin:auto\">\n", LoadPlotSvg(report));
}

}  // namespace cli
