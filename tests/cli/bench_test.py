#!/usr/bin/env python3
"""`ferry bench` against a system of real processes, in a closed loop and at a rate.

usage: bench_test.py BIN_DIR MODEL_DIR
"""
import json
import pathlib
import subprocess
import sys
import tempfile

binaries, model = pathlib.Path(sys.argv[1]), sys.argv[2]


def bench(address, folder, *flags):
    out = folder / "bench.json"
    run = subprocess.run([binaries / "ferry", "bench", "--address", address, "--input_tokens", "20",
                          "--output_tokens", "6", "--requests", "12", "--json", out, *flags],
                         capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(out.read_text())
    assert result["good"] == 12 and not result["failures"], result
    assert result["output_tokens_per_s"] > 0 and result["ttft_ms"]["median"] > 0, result
    return result


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    serve = subprocess.Popen([binaries / "ferry", "serve", "--model", model, "--log_file", folder / "log"],
                             stdout=subprocess.PIPE, text=True)
    try:
        address = serve.stdout.readline().split()[-1]
        closed = bench(address, folder, "--concurrency", "4")
        assert closed["request_rate"] == 0 and closed["within_slo"] == 12, closed
        rate = bench(address, folder, "--concurrency", "12", "--request_rate", "100", "--seed", "1",
                     "--slo_ttft_ms", "60000", "--slo_tpot_ms", "60000")
        assert rate["within_slo"] == 12 and rate["goodput_per_s"] > 0, rate
        never = bench(address, folder, "--concurrency", "12", "--slo_ttft_ms", "0.001")
        assert never["within_slo"] == 0 and never["goodput_per_s"] == 0, never
    finally:
        serve.terminate()
        code = serve.wait(timeout=60)
    assert code == 0, code
print("ok")
