"""The Python package against a system of real processes, and against a server whose failures are known.

Run by the virtual environment's Python:   client_test.py BIN_DIR SOURCE_DIR
"""
from __future__ import annotations

import concurrent.futures
import importlib.metadata
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import ferry
import grpc
from ferry.v1 import error_pb2, inference_pb2, inference_pb2_grpc
from google.protobuf import duration_pb2

BINARIES, SOURCE = (pathlib.Path(name) for name in sys.argv[1:3])
PROMPT = "It is a truth universally acknowledged"
LIMIT_S = 100.0


def request(text: str = PROMPT, tokens: int = 24) -> ferry.GenerateRequest:
    return ferry.GenerateRequest(text=text, sampling=ferry.SamplingParams(temperature=0, max_tokens=tokens))


class LiveSystem:
    """`ferry serve` of the demo model, until the block is left."""

    def __init__(self, folder: str, *flags: str) -> None:
        self.serve = subprocess.Popen(
            [BINARIES / "ferry", "serve", "--model", SOURCE / "models/demo", "--log_file", f"{folder}/log", *flags],
            stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> str:
        assert self.serve.stdout is not None
        return self.serve.stdout.readline().split()[-1]

    def __exit__(self, *_: object) -> None:
        self.serve.terminate()
        assert self.serve.wait(timeout=LIMIT_S) == 0
        assert self.serve.stdout is not None
        self.serve.stdout.close()


class LiveTest(unittest.TestCase):
    folder: tempfile.TemporaryDirectory[str]
    system: LiveSystem
    address: str
    client: ferry.Client

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        cls.system = LiveSystem(cls.folder.name)
        cls.address = cls.system.__enter__()
        cls.client = ferry.Client(cls.address, timeout=LIMIT_S)
        cls.client.wait_until_ready(timeout=LIMIT_S)

    @classmethod
    def tearDownClass(cls) -> None:
        cls.client.close()
        cls.system.__exit__()
        cls.folder.cleanup()

    def test_the_stream_is_the_text_of_one_engine(self) -> None:
        alone = subprocess.run(
            [BINARIES / "ferry", "generate", "--model", SOURCE / "models/demo", "--prompt", PROMPT, "--max_tokens", "24",
             "--temperature", "0", "--quiet"], capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
        messages = list(self.client.generate(request()))
        self.assertEqual("".join(message.text for message in messages), alone.rstrip("\n"))
        self.assertGreater(len(messages), 1)
        self.assertEqual(messages[-1].summary.completion_tokens, 24)
        completion = self.client.complete(request())
        self.assertEqual(completion.text, alone.rstrip("\n"))
        self.assertEqual(len(completion.token_ids), 24)
        self.assertEqual(completion.finish_reason, inference_pb2.FINISH_REASON_LENGTH)

    def test_tokens_and_text(self) -> None:
        ids = self.client.tokenize(PROMPT)
        self.assertEqual(self.client.detokenize(self.client.tokenize(PROMPT, add_special_tokens=False)), PROMPT)
        as_ids = request()
        as_ids.tokens.ids.extend(ids)
        self.assertEqual(self.client.complete(as_ids).text, self.client.complete(request()).text)

    def test_models(self) -> None:
        self.assertEqual([(card.name, card.ready) for card in self.client.list_models()], [("demo", True)])
        self.client.check_ready("demo", timeout=LIMIT_S)
        with self.assertRaises(ferry.Error) as caught:
            self.client.check_ready("other", timeout=LIMIT_S)
        self.assertEqual(caught.exception.message, "the router does not serve model other, it serves demo")

    def test_errors_keep_code_and_message(self) -> None:
        bad = request()
        bad.sampling.temperature = -1
        with self.assertRaises(ferry.Error) as caught:
            self.client.complete(bad)
        self.assertEqual(caught.exception.code, grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("temperature", caught.exception.message)
        with self.assertRaises(ferry.Error) as caught:
            self.client.tokenize("x", model="other")
        self.assertEqual(caught.exception.code, grpc.StatusCode.NOT_FOUND)

    def test_the_examples_of_the_readme_run(self) -> None:
        page = (SOURCE / "client/README.md").read_text(encoding="utf-8")
        examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        self.assertEqual(len(examples), 2)
        for example in examples:
            run = subprocess.run([sys.executable, "-c", example.replace("127.0.0.1:8500", self.address)],
                                 capture_output=True, text=True, timeout=LIMIT_S, check=False)
            self.assertEqual((run.returncode, run.stderr), (0, ""))
            self.assertGreater(len(run.stdout), 24)

    def test_a_worker_is_no_router(self) -> None:
        worker = self.client.complete(request()).summary.decode_worker
        with ferry.Client(worker, timeout=LIMIT_S) as client:
            for call, method in ((lambda: client.complete(request()), "Generate"), (lambda: client.tokenize("x"), "Tokenize"),
                                 (lambda: client.detokenize([1]), "Detokenize"), (client.wait_until_ready, "ListModels")):
                with self.assertRaises(ferry.Error) as caught:
                    call()
                self.assertEqual(caught.exception.code, grpc.StatusCode.UNIMPLEMENTED)
                self.assertEqual(caught.exception.message, f"{worker} is no router: it does not serve Inference.{method}; "
                                                           "give the router's address")

    def test_threads_share_one_client(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            texts = set(pool.map(lambda _: self.client.complete(request()).text, range(16)))
        self.assertEqual(len(texts), 1)


class TlsTest(unittest.TestCase):
    def test_mutual_tls(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            script = """cd "$0"; k='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
                openssl req -x509 $k -keyout ca.key -out ca.pem -days 2 -subj /CN=test-ca
                echo 'subjectAltName=DNS:localhost,IP:127.0.0.1' > ext
                openssl req $k -keyout me.key -out me.csr -subj /CN=me
                openssl x509 -req -in me.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out me.pem"""
            subprocess.run(["bash", "-ec", script, folder], check=True, capture_output=True)
            ca, pem, key = (f"{folder}/{name}" for name in ("ca.pem", "me.pem", "me.key"))
            with LiveSystem(folder, "--tls_cert", pem, "--tls_key", key, "--tls_ca", ca) as address:
                with ferry.Client(address, tls_ca_file=ca, tls_cert_file=pem, tls_key_file=key) as client:
                    self.assertEqual(len(client.complete(request(), timeout=LIMIT_S).token_ids), 24)
                for stranger in (ferry.Client(address, tls_ca_file=ca), ferry.Client(address)):
                    with stranger, self.assertRaises(ferry.Error) as caught:
                        stranger.list_models(timeout=LIMIT_S)
                    self.assertEqual(caught.exception.code, grpc.StatusCode.UNAVAILABLE)


class LonelyRouterTest(unittest.TestCase):
    def test_a_router_s_unavailable_is_tried_again(self) -> None:
        """A router says it in a form that gRPC tries again: its log has a line for every attempt."""
        with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+", encoding="utf-8") as log:
            ports = pathlib.Path(folder, "ports")
            router = subprocess.Popen(
                [BINARIES / "ferry-router", "--model_assets", SOURCE / "models/demo", "--workers", "127.0.0.1:1", "--listen",
                 "127.0.0.1:0", "--metrics_listen", "127.0.0.1:0", "--port_file", ports, "--worker_wait_s", "0.01"], stderr=log)
            try:
                deadline = time.monotonic() + LIMIT_S
                while not ports.exists() or "metrics_port=" not in ports.read_text():
                    assert router.poll() is None and time.monotonic() < deadline, log.read()
                    threading.Event().wait(0.05)
                port = re.findall(r"grpc_port=(\d+)", ports.read_text())[0]
                with ferry.Client(f"127.0.0.1:{port}", timeout=LIMIT_S, first_backoff=0.002) as client:
                    with self.assertRaises(ferry.Error) as caught:
                        client.complete(request())
            finally:
                router.terminate()
                self.assertEqual(router.wait(timeout=LIMIT_S), 0)
            self.assertEqual(caught.exception.code, grpc.StatusCode.UNAVAILABLE)
            log.seek(0)
            self.assertEqual(len(re.findall("request_id=.* status=unavailable", log.read())), 3)


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Fails `num_unavailable` calls, then answers; the prompt's text chooses how."""

    def __init__(self) -> None:
        self.num_unavailable, self.num_calls, self.release = 0, 0, threading.Event()

    def Generate(self, request: ferry.GenerateRequest, context: grpc.ServicerContext) -> Iterator[ferry.GenerateResponse]:
        self.num_calls += 1
        if self.num_unavailable > 0:
            self.num_unavailable -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "no worker")
        if request.text == "full":
            status = error_pb2.RpcStatus(code=8, message="queue full")
            detail = status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo")
            detail.value = error_pb2.ErrorInfo(reason="QUEUE_FULL", domain="ferry").SerializeToString()
            later = status.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo")
            later.value = error_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2, nanos=500_000_000)).SerializeToString()
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
        if request.text == "silent":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "")
        yield ferry.GenerateResponse(text="first")
        if request.text == "dies":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the worker died")
        if request.text == "stuck":
            self.release.wait(LIMIT_S)
        if request.text != "half":
            yield ferry.GenerateResponse(summary=ferry.GenerateSummary(completion_tokens=1))


class FakeServerTest(unittest.TestCase):
    def setUp(self) -> None:
        self.fake = FakeInference()  # type: ignore[abstract]  # what is not called is not there
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        inference_pb2_grpc.add_InferenceServicer_to_server(self.fake, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()
        self.client = ferry.Client(self.address, timeout=LIMIT_S, first_backoff=0.002)

    def tearDown(self) -> None:
        self.fake.release.set()
        self.client.close()
        self.server.stop(None).wait()

    def failure(self, text: str, timeout: float | None = None) -> ferry.Error:
        with self.assertRaises(ferry.Error) as caught:
            self.client.complete(request(text), timeout=timeout)
        return caught.exception

    def test_unavailable_is_tried_again(self) -> None:
        self.fake.num_unavailable = 2
        self.assertEqual(self.client.complete(request()).text, "first")
        self.assertEqual(self.fake.num_calls, 3)
        self.fake.num_unavailable = 2
        self.assertEqual(self.client.complete(request("word " * 200_000)).text, "first")
        self.assertEqual(self.fake.num_calls, 6)

    def test_attempts_are_bounded(self) -> None:
        self.fake.num_unavailable = 1000
        self.assertEqual(self.failure("x").message, "no worker")
        self.assertEqual(self.fake.num_calls, 3)
        with ferry.Client(self.address, max_attempts=1) as once, self.assertRaises(ferry.Error):
            once.complete(request(), timeout=LIMIT_S)
        self.assertEqual(self.fake.num_calls, 4)

    def test_nothing_is_tried_again_after_a_message_or_another_error(self) -> None:
        self.assertEqual(self.failure("dies").message, "the worker died")
        full = self.failure("full")
        self.assertEqual((full.code, full.message, full.reason, full.retry_after),
                         (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", "QUEUE_FULL", 2.5))
        self.assertIsNone(self.failure("dies").retry_after)
        self.assertEqual(self.failure("half").code, grpc.StatusCode.DATA_LOSS)
        self.assertEqual(self.fake.num_calls, 4)

    def test_timeout(self) -> None:
        self.assertEqual(self.failure("stuck", timeout=0.3).code, grpc.StatusCode.DEADLINE_EXCEEDED)
        self.assertEqual(self.client.complete(request(), timeout=math.inf).text, "first")
        with ferry.Client(self.address, timeout=math.inf) as patient:
            self.assertEqual(patient.complete(request()).text, "first")
        with self.assertRaisesRegex(ValueError, "timeout is nan"):
            self.client.complete(request(), timeout=math.nan)

    def test_cancel(self) -> None:
        with self.client.generate(request("stuck")) as generation:
            self.assertEqual(next(generation).text, "first")
            generation.cancel()
            with self.assertRaises(ferry.Error) as caught:
                next(generation)
        self.assertEqual(caught.exception.code, grpc.StatusCode.CANCELLED)

    def test_no_error_is_without_words(self) -> None:
        self.assertEqual(str(self.failure("silent")), "FAILED_PRECONDITION: failed_precondition")

    def test_a_closed_client_raises_the_one_exception(self) -> None:
        running = self.client.generate(request("stuck"))
        self.assertEqual(next(running).text, "first")
        self.client.close()
        calls: list[Callable[[], object]] = [
            lambda: next(running), lambda: self.client.generate(request()), lambda: self.client.complete(request()),
            lambda: self.client.tokenize("x"), lambda: self.client.detokenize([1]), self.client.list_models,
            self.client.check_ready, self.client.wait_until_ready]
        for call in calls:
            with self.assertRaises(ferry.Error) as caught:
                call()
            self.assertEqual(caught.exception.code, grpc.StatusCode.CANCELLED)
        self.assertEqual(caught.exception.message, "the client is closed")

    def test_nobody_answers(self) -> None:
        self.server.stop(None).wait()
        with self.assertRaises(ferry.Error) as caught:
            self.client.wait_until_ready(timeout=0.3)
        self.assertEqual(caught.exception.message, "not ready after 0.3 s: the router does not answer")


class PackageTest(unittest.TestCase):
    def test_the_version_is_that_of_the_programs(self) -> None:
        said = subprocess.run([BINARIES / "ferry", "--version"], capture_output=True, text=True, check=True, timeout=LIMIT_S)
        self.assertEqual(importlib.metadata.version("ferry-client"), said.stdout.strip())

    def test_arguments_out_of_range(self) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"address": ""}, "address is empty"),
            ({"address": "a:1", "max_attempts": 6}, "max_attempts is 6, it must be 1 to 5"),
            ({"address": "a:1", "first_backoff": 0}, "first_backoff is 0, it must be 0.001 to 10 seconds"),
            ({"address": "a:1", "tls_key_file": "k"}, "a tls certificate and its key are needed together"),
        ]
        for arguments, said in cases:
            with self.assertRaises(ValueError) as caught:
                ferry.Client(**arguments)
            self.assertEqual(str(caught.exception), said)
        with self.assertRaises(OSError):
            ferry.Client("a:1", tls_ca_file="/nowhere")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
