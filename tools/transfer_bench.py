#!/usr/bin/env python3
"""Ferry's transport against ucx_perftest (-e, active messages and tags) over the same link.

Runs interleave, so that what disturbs the machine disturbs everyone; the table has medians.  Both sides
move one reused block; the figure over a pool above the caches stands beside it.

usage: transfer_bench.py [--build build/release] [--rounds 15] [--extra_rounds 3] [--total_mb 1000] [--pool_mb 1024]

Many short rounds: a machine's speed changes by the second, and neighbours in time see the same.  The pool and
UCX's own settings, which no bar is set on, take part in the first `extra_rounds` only.
"""
import argparse
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import time

# What kv_transfer/ucx_config.cc sets, by UCX's full names.
SETTINGS = {
    "shm": {"UCX_TLS": "shm", "UCX_MM_ERROR_HANDLING": "y", "UCX_CMA_MEMORY_INVALIDATE": "y",
            "UCX_RNDV_SCHEME": "get_zcopy"},
    "tcp": {"UCX_TLS": "tcp", "UCX_TCP_PUT_ENABLE": "n", "UCX_ZCOPY_THRESH": "inf",
            "UCX_TCP_TX_SEG_SIZE": "512K", "UCX_TCP_RX_SEG_SIZE": "512K"},
}
# Without them, for comparison: what UCX does by itself on this kind of link.
PLAIN = {"shm": {"UCX_TLS": "shm,self", "UCX_MM_ERROR_HANDLING": "y"}, "tcp": {"UCX_TLS": "tcp"}}
BLOCKS = {"27 layers": 64 * 27 * 1152, "61 layers": 64 * 61 * 1152}  # 64 tokens in bfloat16


def await_listener(port, server):
    """Returns when the server listens.  A connection to it would count as its client, so the kernel is asked."""
    listening = re.compile(rf"^\s*\d+: [0-9A-F]+:{port:04X} [0-9A-F]+:0000 0A ", re.M)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and server.poll() is None:
        if any(listening.search(pathlib.Path(f"/proc/net/{name}").read_text()) for name in ("tcp", "tcp6") if pathlib.Path(f"/proc/net/{name}").exists()):
            return
        time.sleep(0.02)


def perftest(kind, test, block_bytes, total_bytes, settings):
    """GB/s of ucx_perftest between two processes."""
    env = dict(os.environ, UCX_WARN_UNUSED_ENV_VARS="n", **settings)
    for _ in range(3):
        # A server serves one client and ends, whatever became of it: each try has its own.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = subprocess.Popen(["ucx_perftest", "-p", str(port)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            await_listener(port, server)
            command = ["ucx_perftest", "127.0.0.1", "-p", str(port), "-e", "-f", "-t", test, "-s", str(block_bytes), "-n",
                       str(max(20, total_bytes // block_bytes)), "-w", "20"]
            run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        finally:
            server.kill()
            server.wait()
        numbers = re.findall(r"^(?:Final:)?\s*[\d.]+.*$", run.stdout, re.M)
        if run.returncode == 0 and numbers:
            # ... overall MB/s is the sixth figure of "iterations, percentile, average, overall, MB/s avg, MB/s all"
            words = numbers[-1].replace("Final:", "").split()
            return float(words[5]) * 1048576 / 1e9
    sys.exit(f"ucx_perftest failed: {run.stdout}{run.stderr}")


def ferry(build, kind, block_bytes, total_bytes, pool_bytes):
    """GB/s of bench/transfer_bandwidth."""
    run = subprocess.run([f"{build}/bin/transfer_bandwidth", f"--kind={kind}", f"--block_bytes={block_bytes}", f"--total_bytes={total_bytes}", f"--pool_bytes={pool_bytes}"],
                         capture_output=True, text=True, timeout=300)
    match = re.search(r"([\d.]+) GB/s", run.stdout)
    if run.returncode != 0 or not match:
        sys.exit(f"transfer_bandwidth failed: {run.stdout}{run.stderr}")
    return float(match.group(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--extra_rounds", type=int, default=3)
    parser.add_argument("--total_mb", type=int, default=1000)
    parser.add_argument("--pool_mb", type=int, default=1024)
    parser.add_argument("--kinds", default="tcp,shm")
    arguments = parser.parse_args()
    total = arguments.total_mb * 1000000
    cpu = re.search(r"model name\s*:\s*(.*)", pathlib.Path("/proc/cpuinfo").read_text())
    control = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(f"{cpu.group(1) if cpu else '?'}, {os.cpu_count()} cores, TCP congestion control {control}, load {os.getloadavg()[0]:.1f}")
    print("medians in GB/s (spread)")
    header = ["ferry", "ferry, pool", "AM", "tag", "AM, plain UCX", "tag, plain UCX"]
    print(f"{'link':5} {'block':10}" + "".join(f"{name:>22}" for name in header) + "   ferry / better of AM, tag")
    for kind in arguments.kinds.split(","):
        for name, block in BLOCKS.items():
            runs = {one: [] for one in header}
            for round in range(arguments.rounds):
                runs["ferry"].append(ferry(arguments.build, kind, block, total, 0))
                runs["AM"].append(perftest(kind, "ucp_am_bw", block, total, SETTINGS[kind]))
                runs["tag"].append(perftest(kind, "tag_bw", block, total, SETTINGS[kind]))
                if round >= arguments.extra_rounds:
                    continue
                runs["ferry, pool"].append(ferry(arguments.build, kind, block, total, arguments.pool_mb * 1048576))
                runs["AM, plain UCX"].append(perftest(kind, "ucp_am_bw", block, total, PLAIN[kind]))
                runs["tag, plain UCX"].append(perftest(kind, "tag_bw", block, total, PLAIN[kind]))
            middle = {one: statistics.median(values) for one, values in runs.items()}
            cells = "".join(f"{middle[one]:9.2f} ({min(runs[one]):.2f}-{max(runs[one]):.2f})".rjust(22) for one in header)
            print(f"{kind:5} {name:10}{cells}   {100 * middle['ferry'] / max(middle['AM'], middle['tag']):.0f} %", flush=True)


if __name__ == "__main__":
    main()
