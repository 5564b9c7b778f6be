#!/usr/bin/env python3
"""`ferry bench` against a system of real processes, and against an OpenAI server that answers with known delays.

usage: bench_test.py BIN_DIR MODEL_DIR
"""
import http.server
import json
import os
import pathlib
import pty
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree

binaries, model = pathlib.Path(sys.argv[1]), sys.argv[2]
FIRST_S, FURTHER_S, CHUNKS = 0.1, 0.02, 5
LIMIT_S = 120


def bench(*flags, code=0, **more):
    run = subprocess.run([binaries / "ferry", "bench", *map(str, flags)], capture_output=True, text=True, timeout=LIMIT_S,
                         check=False, **more)
    assert run.returncode == code, run.stdout + run.stderr
    return run


def report(folder, *flags, good=12):
    out, plot = folder / "bench.json", folder / "bench.svg"
    text = bench("--json", out, "--plot", plot, *flags).stdout
    result = json.loads(out.read_text())
    assert result["good"] == good and not result["failures"], result
    assert result["output_tokens_per_s"] > 0 and result["ttft_ms"]["median"] > 0, result
    page = xml.etree.ElementTree.parse(plot).getroot()
    assert page.tag.endswith("svg") and text.splitlines()[0] in "".join(page.itertext()), text
    return result


class FakeOpenAi(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    prompts, connections, fail = [], set(), False

    def log_message(self, *_):
        pass

    def answer(self, status, kind, body=None):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header(*(("Transfer-Encoding", "chunked") if body is None else ("Content-Length", str(len(body)))))
        self.end_headers()
        self.wfile.write(body or b"")

    def event(self, data):
        piece = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def do_GET(self):
        self.answer(200, "application/json", json.dumps({"data": [{"id": "fake"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.prompts.append(body["prompt"])
        self.connections.add(self.client_address)
        if self.fail:
            self.answer(503, "application/json", b'{"error": {"message": "no worker"}}')
            return
        self.answer(200, "text/event-stream")
        for number in range(CHUNKS):
            threading.Event().wait(FURTHER_S if number else FIRST_S)
            self.event({"choices": [{"text": "word "}]})
        self.event({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 2 * CHUNKS}})
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


def check_openai(folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeOpenAi)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = ("--backend", "openai", "--base_url", f"http://127.0.0.1:{server.server_port}", "--requests", 12)

    # On this machine's own clock: no time can be shorter than the server's delays.
    result = report(folder, *flags, "--concurrency", 3, "--input_tokens", "5:9", "--seed", 1, "--slo_ttft_ms", 60000)
    assert result["model"] == "fake" and result["backend"] == "openai" and result["within_slo"] == 12, result
    assert result["ttft_ms"]["mean"] >= 1e3 * FIRST_S, result
    assert result["itl_ms"]["mean"] >= 0.9e3 * FURTHER_S, result
    assert result["e2e_ms"]["mean"] >= result["ttft_ms"]["mean"] + 0.9e3 * FURTHER_S * (CHUNKS - 1), result
    rest = result["e2e_ms"]["mean"] - result["ttft_ms"]["mean"]
    assert abs(result["tpot_ms"]["mean"] * (2 * CHUNKS - 1) - rest) < 1e-6 * rest, result
    assert result["output_tokens"] == 12 * 2 * CHUNKS and result["cached_tokens"] is None, result
    assert 1 <= len(FakeOpenAi.connections) <= 3, "a user keeps its connection"
    assert {len(prompt) for prompt in FakeOpenAi.prompts} <= set(range(5, 10)), FakeOpenAi.prompts

    FakeOpenAi.prompts.clear()
    result = report(folder, *flags, "--turns", 3, "--input_tokens", 4, "--output_tokens", 6, "--shared_prefix_tokens", 8)
    assert [len(prompt) for prompt in FakeOpenAi.prompts] == [12, 22, 32] * 4, FakeOpenAi.prompts
    assert result["attainable_tokens"] == 4 * (12 + 22) + 3 * 8, result
    first, second, third, other = FakeOpenAi.prompts[:4]
    assert second[:12] == first and third[:22] == second and other[:8] == first[:8] and other[8:] != first[8:]

    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(12)))
    FakeOpenAi.prompts.clear()
    report(folder, *flags, "--dataset", dataset)
    assert FakeOpenAi.prompts == [f"number {i}" for i in range(12)], FakeOpenAi.prompts

    trace = folder / "blocks.jsonl"
    trace.write_text("".join(json.dumps({"input_length": 600, "output_length": 3, "hash_ids": [1, 10 + i]}) + "\n"
                             for i in range(12)))
    FakeOpenAi.prompts.clear()
    result = report(folder, *flags, "--block_trace", trace)
    assert len({tuple(prompt[:512]) for prompt in FakeOpenAi.prompts}) == 1, "they share a block"
    assert len({tuple(prompt) for prompt in FakeOpenAi.prompts}) == 12 and result["attainable_tokens"] == 11 * 512, result

    # On a terminal a line tells how far it is.
    here, there = pty.openpty()
    run = subprocess.Popen([binaries / "ferry", "bench", *map(str, flags)], stderr=there, stdout=subprocess.DEVNULL)
    os.close(there)
    shown = b""
    while True:
        try:
            shown += os.read(here, 4096)
        except OSError:  # the other side has closed
            break
    os.close(here)
    assert run.wait(timeout=LIMIT_S) == 0 and b"/12  " in shown and b" tokens/s" in shown, shown

    FakeOpenAi.fail = True
    failed = bench(*flags, code=1)
    assert failed.stderr == "ferry: all: 12 of 12 requests failed\n", failed.stderr
    assert "12 x UNAVAILABLE: HTTP 503: no worker" in failed.stdout and "TTFT" not in failed.stdout, failed.stdout
    server.shutdown()


def check_wrong_flags():
    for flags, said in (((), "--backend grpc needs --address, and no --base_url"),
                        (("--backend", "openai"), "--backend openai needs --base_url, and no --address"),
                        (("--address", "a:1", "--base_url", "b:2"), "--backend grpc needs --address, and no --base_url"),
                        (("--address", "127.0.0.1:1", "--json", "/nowhere/x"), "cannot write /nowhere/x")):
        assert bench(*flags, code=1).stderr == f"ferry: {said}\n", flags

    for flag in ("--request_rate", "--temperature", "--slo_ttft_ms", "--slo_tpot_ms", "--slo_itl_ms", "--slo_e2e_ms"):
        for value in ("nan", "inf", "-1", "1x"):
            wrong = bench("--address", "127.0.0.1:1", flag, value, code=105)
            assert f"{flag}: {value} is not a number of 0 to 1" in wrong.stderr, wrong.stderr
    ambiguous = bench("--address", "127.0.0.1:1", "--dataset", "x", "--turns", 2, code=108)
    assert "--turns excludes --dataset" in ambiguous.stderr, ambiguous.stderr


def check_live(folder, address):
    flags = ("--address", address, "--output_tokens", 6, "--requests", 12)
    closed = report(folder, *flags, "--input_tokens", 20, "--concurrency", 4)
    assert closed["request_rate"] == 0 and closed["within_slo"] == 12, closed
    rate = report(folder, *flags, "--input_tokens", 20, "--request_rate", 100, "--seed", 1, "--slo_ttft_ms", 60000,
                  "--slo_tpot_ms", 60000)
    assert rate["within_slo"] == 12 and rate["goodput_per_s"] > 0 and rate["concurrency"] == 12, rate
    never = report(folder, *flags, "--input_tokens", 20, "--slo_ttft_ms", 0.001)
    assert never["within_slo"] == 0 and never["goodput_per_s"] == 0, never
    between = [report(folder, *flags, "--input_tokens", 20, "--slo_itl_ms", limit)["within_slo"] for limit in (0.0001, 60000)]
    assert between[0] < between[1] == 12, between  # an answer in one message has no time between tokens
    assert never["cached_tokens"] == never["attainable_tokens"] == 0, never

    # The default prompt is prefilled by a prefill worker, and its cache crosses.
    moved = report(folder, "--address", address, "--requests", 2, good=2)
    assert moved["prompt_tokens"] == 1024 and moved["kv_bytes"] > 0, moved

    # What is reused is never more than what can be.  How much less depends on blocks, and on what the router has heard of.
    for trace in (("--shared_prefix_tokens", 256, "--input_tokens", 64), ("--turns", 4, "--input_tokens", 130)):
        reuse = report(folder, *flags, *trace, "--seed", 7)
        assert 0.3 * reuse["attainable_tokens"] <= reuse["cached_tokens"] <= reuse["attainable_tokens"], reuse

    for wrong, said in ((("--input_tokens", "9:8"), "ferry: 9:8 is no number of tokens"),
                        (("--turns", 5), "ferry: --requests 12 is no multiple of --turns 5")):
        assert bench(*flags, *wrong, code=1).stderr.startswith(said), wrong


def check_live_http(folder, url):
    """The same system over its own HTTP front: what the workers report comes through."""
    vocabulary = json.loads(pathlib.Path(model, "config.json").read_text())["vocab_size"]
    flags = ("--backend", "openai", "--base_url", url, "--output_tokens", 6, "--requests", 12)  # the front tells the vocabulary
    closed = report(folder, *flags, "--input_tokens", 20, "--concurrency", 4)
    assert closed["backend"] == "openai" and closed["model"] == pathlib.Path(model).name, closed
    assert closed["prompt_tokens"] == 12 * 20 and closed["output_tokens"] == 12 * 6, closed
    assert closed["cached_tokens"] == closed["attainable_tokens"] == 0, closed
    report(folder, *flags, "--input_tokens", 20, "--request_rate", 100, "--seed", 1)
    reuse = report(folder, *flags, "--turns", 4, "--input_tokens", 130, "--seed", 8)
    assert 0.3 * reuse["attainable_tokens"] <= reuse["cached_tokens"] <= reuse["attainable_tokens"], reuse
    dataset = folder / "live.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": f"It was the year {i}"}) + "\n" for i in range(12)))
    report(folder, *flags, "--dataset", dataset)
    wrong = bench(*flags, "--vocab_size", 10 * vocabulary, "--input_tokens", 20, code=1)
    assert "INVALID_ARGUMENT: HTTP 400: prompt[" in wrong.stdout, wrong.stdout


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    check_openai(folder)
    check_wrong_flags()
    serve = subprocess.Popen([binaries / "ferry", "serve", "--model", model, "--port", "0", "--log_file", folder / "log"],
                             stdout=subprocess.PIPE, text=True)
    try:
        address, url = (serve.stdout.readline().split()[-1] for _ in range(2))
        check_live(folder, address)
        check_live_http(folder, url)
    finally:
        serve.terminate()
        code = serve.wait(timeout=LIMIT_S)
    assert code == 0, code
print("ok")
