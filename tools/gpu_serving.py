#!/usr/bin/env python3
"""Serving numbers of a GPU machine: real processes, random weights of a real model's shapes.

  tools/gpu_serving.py --bin DIR --model bench/models/deepseek-v2-lite --out FILE.json [--layout both ...]

Layouts, on the GPUs of CUDA_VISIBLE_DEVICES: `both` is one worker on GPU 0 that prefills and decodes;
`two_both` two of them; `split` a prefill worker on GPU 0 and a decode worker on GPU 1; `shared` both
of these on GPU 0.  Each is measured with 1 and with 100 requests at once, 999 tokens in and 100 out,
or what --point says; with --rates also with Poisson arrivals, as goodput under TTFT <= 500 ms and
ITL <= 20 ms (in 99 of 100 cases).
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

SLO = ["--slo_ttft_ms", "500", "--slo_itl_ms", "20"]


class System:
    """A router and workers; ended, in order, by `with`."""

    def __init__(self, args, layout):
        self.args, self.layout, self.processes = args, layout, []
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ferry_serving_"))
        self.gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")

    def __enter__(self):
        try:
            workers = {"both": [("decode", 0, True)],
                       "two_both": [("decode", 0, True), ("decode", 1, True)],
                       "split": [("prefill", 0, False), ("decode", 1, False)],
                       "shared": [("prefill", 0, False), ("decode", 0, False)]}[self.layout]
            names = [self.start_worker(i, *worker) for i, worker in enumerate(workers)]
            addresses = [self.address(name) for name in names]
            name = pathlib.Path(self.args.model).resolve().name
            local = "0" if self.layout in ("split", "shared") else "1000000"
            self.start("router", 0, [f"--workers={','.join(addresses)}", "--listen=127.0.0.1:0",
                                     f"--model_assets={name}={self.args.model}",
                                     f"--local_prefill_tokens={local}"])
            self.router = self.address("router")
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()

    def start(self, name, gpu, flags):
        kind = name.split("-")[0]
        log = open(self.folder / f"{name}.log", "w", encoding="utf-8")
        self.processes.append(subprocess.Popen(
            [f"{self.args.bin}/ferry-{kind}", f"--port_file={self.folder / name}",
             "--metrics_listen=127.0.0.1:0", *flags],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": self.gpus[gpu]}, stdout=log, stderr=log))

    def start_worker(self, number, kind, gpu, both):
        name = f"{kind}-{number}"
        flags = ["--listen=127.0.0.1:0", f"--model={self.args.model}", "--random_weights",
                 "--device=cuda", f"--cache_bytes={self.args.cache_bytes}", f"--max_model_len={self.args.max_model_len}",
                 f"--max_seqs={self.args.max_seqs}", f"--max_batch_tokens={self.args.batch_tokens}",
                 f"--kv_cache_dtype={self.args.kv_cache_dtype}",
                 f"--chunk_tokens={self.args.batch_tokens if kind == 'prefill' else self.args.chunk_tokens}"]
        if both:
            flags.append("--role=both")
        flags += self.args.worker_flag
        self.start(name, gpu, flags)
        return name

    def address(self, name):
        deadline = time.monotonic() + 180
        path = self.folder / name
        while time.monotonic() < deadline:
            if path.exists() and "grpc_port=" in path.read_text():
                return "127.0.0.1:" + path.read_text().split("grpc_port=")[1].split()[0]
            for process in self.processes:
                if process.poll() is not None:
                    raise SystemExit(self.logs())
            time.sleep(0.05)
        raise SystemExit(f"{name} did not start\n{self.logs()}")

    def logs(self):
        return "\n".join(f"== {p.name}\n{p.read_text()[-3000:]}" for p in self.folder.glob("*.log"))

    def bench(self, requests, concurrency, *flags, input_tokens=999, output_tokens=100):
        out = self.folder / "bench.json"
        run = subprocess.run([f"{self.args.bin}/ferry", "bench", "--address", self.router,
                              "--input_tokens", str(input_tokens), "--output_tokens", str(output_tokens),
                              "--requests", str(requests), "--concurrency", str(concurrency),
                              "--ready_timeout_s", "60", "--json", str(out), *flags],
                             capture_output=True, text=True, timeout=400, check=False)
        print(run.stdout + run.stderr, flush=True)
        if self.args.logs:
            print(self.logs(), flush=True)
        if run.returncode != 0:
            print(self.logs())
            raise SystemExit(1)
        return {"layout": self.layout, "chunk_tokens": self.args.chunk_tokens, "tokens_in": input_tokens, "tokens_out": output_tokens,
                **json.loads(out.read_text())}


def point(text):
    input_tokens, output_tokens, requests, concurrency = map(int, text.split(":"))
    return {"requests": requests, "concurrency": concurrency, "input_tokens": input_tokens, "output_tokens": output_tokens}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--layout", action="append", choices=["both", "two_both", "split", "shared"])
    parser.add_argument("--point", action="append", type=point, metavar="IN:OUT:REQUESTS:CONCURRENCY",
                        help="instead of 999:100:8:1 and 999:100:100:100")
    parser.add_argument("--worker_flag", action="append", default=[], help="another flag of every worker: --worker_flag=--cache_path=staged")
    parser.add_argument("--rates", default="", help="requests a second, comma-separated")
    parser.add_argument("--rate_requests", type=int, default=200)
    parser.add_argument("--rates_only", action="store_true", help="nothing all at once")
    parser.add_argument("--cache_bytes", type=int, default=6 << 30)
    parser.add_argument("--kv_cache_dtype", default="auto")
    parser.add_argument("--logs", action="store_true", help="also print the end of every process's log")
    parser.add_argument("--max_model_len", type=int, default=8192)
    parser.add_argument("--max_seqs", type=int, default=128)
    parser.add_argument("--batch_tokens", type=int, default=8192)
    parser.add_argument("--chunk_tokens", type=int, default=8192,
                        help="of prompts in a step of a worker that decodes as well")
    args = parser.parse_args()
    results = []
    for layout in args.layout or ["both"]:
        with System(args, layout) as system:
            system.bench(4, 1)  # warms up
            if not args.rates_only:
                for one in args.point or [point("999:100:8:1"), point("999:100:100:100")]:
                    results.append(system.bench(**one))
            for rate in filter(None, args.rates.split(",")):
                results.append(system.bench(args.rate_requests, 512, "--request_rate", rate, *SLO))
    pathlib.Path(args.out).write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
