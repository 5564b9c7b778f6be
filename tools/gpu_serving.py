#!/usr/bin/env python3
"""Serving numbers of a GPU machine: real processes, random weights of a real model's shapes.

  tools/gpu_serving.py --bin DIR --model bench/models/deepseek-v2-lite --out FILE.json [--layout both ...]

Layouts, on the GPUs of CUDA_VISIBLE_DEVICES: `both` is one worker on GPU 0 that prefills and decodes;
`two_both` two of them; `split` a prefill worker on GPU 0 and a decode worker on GPU 1; `shared` both
of these on GPU 0.  Each is measured with 1 and with 100 requests at once, 999 tokens in and 100 out,
or what --point says; with --rates also with Poisson arrivals, as goodput under TTFT <= 500 ms and
ITL <= 20 ms (in 99 of 100 cases).  Beside what the client sees stand the router's stages, of transfers
their time and bytes by link and way to it, and when the last request was prefilled and transferred.
With --same_texts greedy answers of all layouts must be the same.
"""
import argparse
import http.server
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

SLO = ["--slo_ttft_ms", "500", "--slo_itl_ms", "20"]


class Spans(http.server.BaseHTTPRequestHandler):
    """Takes the router's spans."""
    taken = {}  # by trace, in order of their coming

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in body["resourceSpans"]:
            for span in resource["scopeSpans"][0]["spans"]:
                Spans.taken.setdefault(span["traceId"], {})[span["name"]] = [int(span[key]) for key in ("startTimeUnixNano", "endTimeUnixNano")]
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        pass

    @staticmethod
    def last():
        """Of the last request: {span: [start, end]} in milliseconds since it came."""
        spans = list(Spans.taken.values())[-1] if Spans.taken else {}
        begin = spans["generate"][0] if spans else 0
        return {name: [round((at - begin) / 1e6, 2) for at in times] for name, times in spans.items()}


class System:
    """A router and workers; ended, in order, by `with`."""

    def __init__(self, args, layout):
        self.args, self.layout, self.processes = args, layout, []
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ferry_serving_"))
        self.collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Spans)
        threading.Thread(target=self.collector.serve_forever, daemon=True).start()
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
                                     f"--local_prefill_tokens={local}",
                                     f"--otlp_endpoint=http://127.0.0.1:{self.collector.server_port}"])
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
        self.collector.shutdown()

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
                 f"--device={self.args.device}", f"--cache_bytes={self.args.cache_bytes}", f"--max_model_len={self.args.max_model_len}",
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

    def totals(self):
        """Sums and counts so far: the router's stages, and transfers as prefill workers see them."""
        totals = {}
        for path in self.folder.iterdir():
            if not path.name.startswith(("router", "prefill")) or path.suffix == ".log":
                continue
            port = path.read_text().split("metrics_port=")[1].split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                for line in page.read().decode().splitlines():
                    name = re.match(r"ferry_(router_stage|transfer)_(seconds_sum|seconds_count|link_bytes_total)", line)
                    if name:
                        key, value = line.rsplit(" ", 1)
                        totals[key] = float(value)
        return totals

    def texts(self):
        """Greedy answers to some prompts, as token ids."""
        texts = []
        for length in [n for n in (5, 640, 999, 3000) if n + 64 <= self.args.max_model_len]:
            draw = random.Random(length)
            ids = ",".join(str(draw.randrange(500)) for _ in range(length))
            texts.append(subprocess.run(
                [f"{self.args.bin}/ferry", "generate", "--address", self.router, "--prompt_ids", ids, "--max_tokens", "64",
                 "--temperature", "0", "--print_ids", "--quiet"], capture_output=True, text=True, timeout=100, check=True).stdout)
        return texts

    def bench(self, requests, concurrency, *flags, input_tokens=999, output_tokens=100):
        out = self.folder / "bench.json"
        before = self.totals()
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
        grown = {key: value - before.get(key, 0) for key, value in self.totals().items()}
        mean_ms = {re.sub(r'.*stage="(.*)".*', r"\1", key.replace("ferry_transfer_seconds_sum", "transfer")):
                   1e3 * value / grown[key.replace("_sum", "_count")]
                   for key, value in grown.items() if "_sum" in key and grown[key.replace("_sum", "_count")] > 0}
        links = {"/".join(re.findall(r'"([^"]*)"', key)): value for key, value in grown.items() if "link_bytes" in key}
        print({name: round(value, 2) for name, value in mean_ms.items()}, links, Spans.last(), flush=True)
        return {"layout": self.layout, "chunk_tokens": self.args.chunk_tokens, "tokens_in": input_tokens, "tokens_out": output_tokens,
                "mean_ms": mean_ms, "link_bytes": links, "last_request_ms": Spans.last(), **json.loads(out.read_text())}


def point(text):
    input_tokens, output_tokens, requests, concurrency = map(int, text.split(":"))
    return {"requests": requests, "concurrency": concurrency, "input_tokens": input_tokens, "output_tokens": output_tokens}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layout", action="append", choices=["both", "two_both", "split", "shared"])
    parser.add_argument("--point", action="append", type=point, metavar="IN:OUT:REQUESTS:CONCURRENCY",
                        help="instead of 999:100:8:1 and 999:100:100:100")
    parser.add_argument("--worker_flag", action="append", default=[], help="another flag of every worker: --worker_flag=--cache_path=staged")
    parser.add_argument("--rates", default="", help="requests a second, comma-separated")
    parser.add_argument("--rate_requests", type=int, default=200)
    parser.add_argument("--rates_only", action="store_true", help="nothing all at once")
    parser.add_argument("--same_texts", action="store_true", help="also compare answers between layouts")
    parser.add_argument("--cache_bytes", type=int, default=6 << 30)
    parser.add_argument("--kv_cache_dtype", default="auto")
    parser.add_argument("--logs", action="store_true", help="also print the end of every process's log")
    parser.add_argument("--max_model_len", type=int, default=8192)
    parser.add_argument("--max_seqs", type=int, default=128)
    parser.add_argument("--batch_tokens", type=int, default=8192)
    parser.add_argument("--chunk_tokens", type=int, default=8192,
                        help="of prompts in a step of a worker that decodes as well")
    args = parser.parse_args()
    results, texts = [], {}
    for layout in args.layout or ["both"]:
        with System(args, layout) as system:
            system.bench(4, 1)  # warms up
            if args.same_texts:
                texts[layout] = system.texts()
            if not args.rates_only:
                for one in args.point or [point("999:100:8:1"), point("999:100:100:100")]:
                    results.append(system.bench(**one))
            for rate in filter(None, args.rates.split(",")):
                results.append(system.bench(args.rate_requests, 512, "--request_rate", rate, *SLO))
    pathlib.Path(args.out).write_text(json.dumps(results, indent=1), encoding="utf-8")
    if any(one != next(iter(texts.values())) for one in texts.values()):
        print(f"answers differ: {json.dumps(texts)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
