#!/usr/bin/env python3
"""Goodput at twice a system's capacity against that at once its capacity.

Starts `ferry serve`, measures its capacity with a closed loop that keeps every seat of the decode
worker taken, then offers that rate and twice that rate as open loops (Poisson) in turns and prints the
goodput of each: requests a second that got their first token, and each further one, in time.  The
router is told the same time to the first token (--max_ttft_s) and refuses what it would serve too late.

    tools/overload_bench.py [--bin build/release/bin] [--seconds 20] [--rounds 3] [--report FILE]

--report appends the numbers to a file of which tools/reliability_report.py makes a table.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run_bench(args, address, flags):
    """One `ferry bench`; requests that fail are part of its numbers."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [f"{args.bin}/ferry", "bench", "--address", address, "--json", out.name,
                   "--input_tokens", str(args.input_tokens),
                   "--output_tokens", str(args.output_tokens)] + flags
        done = subprocess.run(command, capture_output=True, text=True)
        text = pathlib.Path(out.name).read_text()
        if not text:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return json.loads(text)


def open_loop(args, address, rate, slo_tpot_ms):
    requests = max(20, int(rate * args.seconds))
    return run_bench(args, address, [
        "--request_rate", f"{rate:.3f}", "--requests", str(requests),
        "--concurrency", str(min(4096, requests)),
        "--slo_ttft_ms", str(args.slo_ttft_ms), "--slo_tpot_ms", f"{slo_tpot_ms:.3f}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default=str(ROOT / "build/release/bin"))
    parser.add_argument("--model", default=str(ROOT / "models/demo"))
    parser.add_argument("--seats", type=int, default=8, help="sequences of the decode worker")
    parser.add_argument("--input_tokens", type=int, default=300)
    parser.add_argument("--output_tokens", type=int, default=64)
    parser.add_argument("--slo_ttft_ms", type=float, default=1000)
    parser.add_argument("--seconds", type=float, default=20, help="of each open loop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--router_flag", action="append", default=[],
                        help="a further flag of the router; repeatable")
    parser.add_argument("--report", help="file that gets a line with every number")
    args = parser.parse_args()

    serve = subprocess.Popen(
        [f"{args.bin}/ferry", "serve", "--model", args.model, "--num_threads", "1",
         "--log_file", os.devnull, f"--decode_flag=--max_seqs={args.seats}",
         f"--router_flag=--max_ttft_s={args.slo_ttft_ms / 1000:g}"]
        + [f"--router_flag={flag}" for flag in args.router_flag],
        stdout=subprocess.PIPE, text=True)
    try:
        line = serve.stdout.readline()
        address = re.search(r" at (\S+)$", line.strip()).group(1)
        run_bench(args, address, ["--requests", str(4 * args.seats),
                                  "--concurrency", str(args.seats)])  # warm
        closed = run_bench(args, address, ["--requests", str(40 * args.seats),
                                           "--concurrency", str(args.seats + args.seats // 4 + 1)])
        capacity = closed["requests_per_s"]
        slo_tpot_ms = 2 * closed["tpot_ms"]["p99"]
        print(f"capacity {capacity:.2f} requests/s of {args.input_tokens} in, {args.output_tokens} out; "
              f"TPOT p99 {closed['tpot_ms']['p99']:.2f} ms; in time: TTFT {args.slo_ttft_ms:g} ms, "
              f"TPOT {slo_tpot_ms:.2f} ms")
        reports = {1: [], 2: []}
        for _ in range(args.rounds):
            for times in reports:
                report = open_loop(args, address, times * capacity, slo_tpot_ms)
                refused = sum(n for what, n in report["failures"].items()
                              if what.startswith("RESOURCE_EXHAUSTED"))
                failed = sum(report["failures"].values()) - refused
                reports[times].append({**report, "refused": refused, "failed": failed})
                print(f"{times}x: goodput {report['goodput_per_s']:.2f}/s, served "
                      f"{report['requests_per_s']:.2f}/s, {report['within_slo']} of "
                      f"{report['num_requests']} in time, {refused} refused, {failed} failed; TTFT "
                      f"median {report['ttft_ms']['median']:.0f}, p99 {report['ttft_ms']['p99']:.0f} ms",
                      flush=True)
        one, two = (statistics.median(report["goodput_per_s"] for report in reports[times])
                    for times in (1, 2))
        print(f"goodput at twice the capacity: {two:.2f}/s, {100 * two / one:.0f} % of the {one:.2f}/s "
              f"at once the capacity (medians of {args.rounds})")
        if args.report:
            line = {"suite": "overload", "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
                    "machine": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
                    "load": round(os.getloadavg()[0], 1), "capacity": capacity,
                    "input_tokens": args.input_tokens, "output_tokens": args.output_tokens,
                    "slo_ttft_ms": args.slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms,
                    "goodput": {"1": one, "2": two},
                    "runs": {str(times): runs for times, runs in reports.items()}}
            with open(args.report, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    finally:
        serve.terminate()
        serve.wait()


if __name__ == "__main__":
    main()
