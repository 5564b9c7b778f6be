#!/usr/bin/env python3
"""A request's trace: into the router, through every process, out as spans to a collector.

usage: tracing_test.py ROOT BIN_DIR

Real processes; the collector is this one, and it takes only what the published schema of OTLP allows (opentelemetry-proto).
"""
import base64
import http.server
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ROOT, BIN_DIR = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
WAIT_S = 120
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LONG = "It was a truth universally acknowledged that the ferry left at six. " * 8  # prefilled remotely
SHORT = "The ferry left"  # where it is decoded


def messages():
    """The messages of Generate, from the tree's proto."""
    done = subprocess.run(["protoc", f"-I{ROOT / 'proto'}", "--include_imports", "--descriptor_set_out=/dev/stdout", "ferry/v1/inference.proto"],
                          capture_output=True, check=True)
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(done.stdout).file:
        pool.Add(file)
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ferry.v1.{name}")) for name in ("GenerateRequest", "GenerateResponse")]


def hex_ids_as_bytes(span):
    """OTLP's JSON writes ids in hex, where protobuf's own writes base64."""
    for key, length in (("traceId", 32), ("spanId", 16), ("parentSpanId", 16)):
        if key in span:
            assert re.fullmatch(f"[0-9a-f]{{{length}}}", span[key]), (key, span[key])
            span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()


class Collector(http.server.BaseHTTPRequestHandler):
    spans, problems, requests, hang = [], [], 0, threading.Event()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Collector.requests += 1
        if Collector.hang.is_set():
            return time.sleep(WAIT_S)
        status = 503 if Collector.requests == 1 else 200  # the first is to come again
        if status == 200:
            try:
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/json"), self.path
                self.take(json.loads(body))
            except Exception as problem:  # for the test to show
                Collector.problems.append(repr(problem))
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    @staticmethod
    def take(body):
        for resource in body["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    hex_ids_as_bytes(span)
        parsed = json_format.ParseDict(body, ExportTraceServiceRequest())  # refuses what the schema does not have
        for resource in parsed.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            assert names["service.name"] == "ferry-router" and names["service.version"], names
            Collector.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def log_message(self, *args):
        pass


def wait_for(what, condition):
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, f"not within {WAIT_S} s: {what}; {Collector.problems}"
        time.sleep(0.02)


class Router:
    def __init__(self, address):
        self.request, response = messages()
        self.generate = grpc.insecure_channel(address).unary_stream(
            "/ferry.v1.Inference/Generate", request_serializer=lambda m: m.SerializeToString(), response_deserializer=response.FromString)

    def ask(self, request_id, traceparent=None, max_tokens=8, text=LONG):
        """(the trace and span of the answer, the status)"""
        request = self.request(text=text, request_id=request_id)
        request.sampling.max_tokens = max_tokens
        request.sampling.temperature = 0
        call = self.generate(request, timeout=WAIT_S, metadata=[("traceparent", traceparent)] if traceparent else None)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        answer = dict([*call.initial_metadata(), *call.trailing_metadata()])["traceparent"]
        version, trace, span, flags = answer.split("-")
        assert version == "00", answer
        return trace, span, flags, call.code()


def spans_of(trace):
    return {span.name: span for span in list(Collector.spans) if span.trace_id.hex() == trace}


def check_spans(trace, root_span, parent, transferred=True):
    spans = spans_of(trace)
    root = spans["generate"]
    assert root.span_id.hex() == root_span and root.parent_span_id.hex() == parent, root
    assert root.kind == root.SPAN_KIND_SERVER
    assert len({span.span_id for span in spans.values()}) == len(spans)
    for name in ("queue", "prefill", *(["transfer"] if transferred else []), "first_token", "decode"):
        span = spans[name]
        assert span.parent_span_id == root.span_id, span
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano, (root, span)
    assert abs(root.end_time_unix_nano - time.time_ns()) < WAIT_S * 1e9, "wall clock"
    if not transferred:
        assert "transfer" not in spans
        return
    attributes = {a.key: a.value for a in spans["transfer"].attributes}
    assert attributes["ferry.bytes"].int_value > 0 and attributes["ferry.link"].string_value


def check(address, log, serving):
    router = Router(address)
    trace, span, flags, code = router.ask("with-trace", f"00-{TRACE}-{PARENT}-01")
    assert (trace, flags, code) == (TRACE, "01", grpc.StatusCode.OK) and span != PARENT
    wait_for("the spans", lambda: len(spans_of(TRACE)) == 6)
    check_spans(TRACE, span, PARENT)
    assert Collector.requests >= 2, "what was refused for now came again"

    own_trace, own_span, flags, code = router.ask("without-trace")
    assert (flags, code) == ("01", grpc.StatusCode.OK) and own_trace != TRACE
    wait_for("the spans of a trace that began here", lambda: len(spans_of(own_trace)) == 6)
    check_spans(own_trace, own_span, "")

    local, local_span, _, code = router.ask("local", text=SHORT)
    assert code == grpc.StatusCode.OK
    wait_for("the spans of a request without a transfer", lambda: len(spans_of(local)) == 5)
    check_spans(local, local_span, "", transferred=False)

    unsampled, _, flags, code = router.ask("unsampled", "00-11111111111111111111111111111111-2222222222222222-00")
    assert (unsampled, flags, code) == ("1" * 32, "00", grpc.StatusCode.OK)
    refused, _, _, code = router.ask("refused", "00-33333333333333333333333333333333-2222222222222222-01", max_tokens=10**6)
    assert (refused, code) == ("3" * 32, grpc.StatusCode.INVALID_ARGUMENT), code
    last, _, _, _ = router.ask("last")
    wait_for("the spans of the last", lambda: spans_of(last))
    assert not spans_of(unsampled), "spans of a request that is not sampled"

    # Every line of a request has its trace, in every process that worked on it.
    for request_id, of in (("with-trace", TRACE), ("without-trace", own_trace), ("unsampled", unsampled), ("refused", refused)):
        processes = {"ferry-router"} if request_id == "refused" else {"ferry-router", "ferry-prefill", "ferry-decode"}
        said = lambda: [line for line in log.read_text().splitlines() if re.search(rf"request_id={request_id}(#\w+)? ", line)]
        wait_for(f"lines of {request_id}", lambda: {re.search(r"process=(\S+)", line)[1] for line in said()} == processes)
        for line in said():
            assert f" trace_id={of} " in line, line

    # A collector that takes and never answers holds nobody up.
    Collector.hang.set()
    started = time.monotonic()
    for i in range(20):
        assert router.ask(f"hanging-{i}")[3] == grpc.StatusCode.OK
    print(f"20 requests in {time.monotonic() - started:.2f} s while the collector hangs; {len(Collector.spans)} spans, {Collector.requests} posts")
    assert not Collector.problems, Collector.problems
    started = time.monotonic()
    serving.terminate()
    assert serving.wait(WAIT_S) == 0
    print(f"ended within {time.monotonic() - started:.1f} s")


def main():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory, "log")
        serving = subprocess.Popen(
            [BIN_DIR / "ferry", "serve", "--model", ROOT / "models/demo", "--port", "0", "--log_file", log, "--router_flag=--local_prefill_tokens=16",
             f"--router_flag=--otlp_endpoint=http://127.0.0.1:{server.server_port}"], stdout=subprocess.PIPE, text=True)
        try:
            line = serving.stdout.readline()
            assert line.startswith("serving demo at "), log.read_text()
            check(line.split()[-1], log, serving)
        except BaseException:
            print(log.read_text()[-8000:])
            raise
        finally:
            serving.kill()
            serving.wait()


if __name__ == "__main__":
    main()
