#!/usr/bin/env python3
"""The routing policies on real workers: one seeded trace of conversations over shared prefixes, per policy.

usage: routing_bench.py --model DIR [--build build/release] [--prefill 3] [--decode 2] [--conversations 60] [--rate 0.5]

Each policy gets a fresh system (`ferry serve`) and the same trace (`ferry bench`, the same seed).  Reusable is the share of
the prompt tokens that came in an earlier prompt or answer, hits the share that was not computed again.
"""
import argparse
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time


def serve(arguments, policy, folder):
    """Starts a system; gives the process and its port."""
    port_file = folder / "port"
    command = [f"{arguments.build}/bin/ferry", "serve", "--model", arguments.model, "--port", "0", "--prefill", str(arguments.prefill),
               "--decode", str(arguments.decode), "--num_threads", "1", "--router_flag=--policy=" + policy, "--router_flag=--log_level=warn",
               "--port_file", str(port_file), "--log_file", str(folder / "log")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit(f"ferry serve did not start:\n{(folder / 'log').read_text()}")
        time.sleep(0.05)
    return process, int(port_file.read_text().split("grpc_port=")[1].split()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--prefill", type=int, default=3)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.5, help="conversations that begin in a second")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{arguments.conversations} conversations of {arguments.turns} turns, {arguments.rate}/s; {arguments.prefill} prefill and {arguments.decode} decode workers")
    print(f"{'policy':12} {'hits':>7} {'reusable':>9} {'TTFT ms: mean':>14} {'p90':>7} {'p99':>7} {'good':>9}")
    for policy in ("cost", "least_load", "round_robin"):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            process, port = serve(arguments, policy, folder)
            try:
                report = folder / "report.json"
                subprocess.run([f"{arguments.build}/bin/ferry", "bench", "--address", f"127.0.0.1:{port}", "--requests", str(arguments.conversations * arguments.turns),
                                "--turns", str(arguments.turns), "--request_rate", str(arguments.rate), "--input_tokens", "600:1000", "--output_tokens", "20:50",
                                "--shared_prefix_tokens", "128", "--prefix_groups", "6", "--seed", str(arguments.seed), "--json", str(report)],
                               check=True, stdout=subprocess.DEVNULL)
                numbers = json.loads(report.read_text())
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=150)
        prompts, ttft = numbers["prompt_tokens"], numbers["ttft_ms"]
        print(f"{policy:12} {100 * numbers['cached_tokens'] / prompts:6.1f}% {100 * numbers['attainable_tokens'] / prompts:8.1f}% {ttft['mean']:14.0f} {ttft['p90']:7.0f} "
              f"{ttft['p99']:7.0f} {numbers['good']:4}/{numbers['num_requests']}", flush=True)


if __name__ == "__main__":
    main()
