"""Client: calls a router, as the C++ SDK (client/ferry_client.h) does."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Protocol

import grpc

from ferry import error
from ferry.v1 import inference_pb2 as pb
from ferry.v1 import inference_pb2_grpc

_MAX_MESSAGE_BYTES = 64 << 20
_MAX_ATTEMPTS = 5  # gRPC makes no more
_MAX_BACKOFF_S = 10.0
_MOST_SECONDS = 86400.0  # gRPC's clock cannot say "never"
_READY_POLL_S = 0.05  # readiness can only be asked for
_MAX_SENTENCES = 3  # about workers, in one error


@dataclasses.dataclass
class Completion:
    """The whole answer: the text and the tokens of branch 0, and the summary."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    summary: pb.GenerateSummary = dataclasses.field(default_factory=pb.GenerateSummary)


class _Call(Protocol):
    def __next__(self) -> pb.GenerateResponse: ...
    def cancel(self) -> object: ...


class Generation(Iterator[pb.GenerateResponse]):
    """The messages of a generation under way, in their order.

    Iterating raises ferry.Error where the generation fails.  One thread iterates; any may cancel.  Leaving a `with` block, or
    letting go of the object, cancels what still runs.
    """

    def __init__(self, call: _Call, address: str) -> None:
        self._call, self._address = call, address

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> pb.GenerateResponse:
        try:
            return next(self._call)
        except grpc.RpcError as failure:
            raise error.from_grpc(failure, self._address, "Generate") from None

    def cancel(self) -> None:
        """Ends the generation, on the workers too; iterating then raises CANCELLED, unless the end came first."""
        self._call.cancel()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, what: BaseException | None, where: TracebackType | None) -> None:
        self.cancel()


class Client:
    """One connection to a router, which all calls share; made by the first call, and again after it broke.

    A call that ends UNAVAILABLE, or CANCELLED though nobody cancelled it (its router ended), before anything has come back
    is made again, at most `max_attempts` times in all, after pauses that double from `first_backoff` seconds; what has given
    a message never is, nor what failed in another way.
    `timeout` is of a whole call, in seconds, a day at most.  All calls raise ferry.Error.  May be used by many threads at a time.
    """

    def __init__(self, address: str, *, tls_ca_file: str | None = None, tls_cert_file: str | None = None,
                 tls_key_file: str | None = None, timeout: float = 600.0, max_attempts: int = 3,
                 first_backoff: float = 0.2) -> None:
        """address: HOST:PORT.  The files are PEM; none: plaintext; certificate and key: mutual TLS.

        Raises ValueError for an argument out of its range and OSError for a file that cannot be read.
        """
        if not address:
            raise ValueError("address is empty")
        if not 1 <= max_attempts <= _MAX_ATTEMPTS:
            raise ValueError(f"max_attempts is {max_attempts}, it must be 1 to {_MAX_ATTEMPTS}")
        if not 0.001 <= first_backoff <= _MAX_BACKOFF_S:
            raise ValueError(f"first_backoff is {first_backoff}, it must be 0.001 to {_MAX_BACKOFF_S:g} seconds")
        if (tls_cert_file is None) != (tls_key_file is None):
            raise ValueError("a tls certificate and its key are needed together")
        self._address, self._timeout, self._closed = address, _seconds(timeout), False
        options = _channel_options(max_attempts, first_backoff)
        if tls_ca_file is None and tls_cert_file is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            credentials = grpc.ssl_channel_credentials(*(
                None if name is None else pathlib.Path(name).read_bytes()
                for name in (tls_ca_file, tls_key_file, tls_cert_file)))
            self._channel = grpc.secure_channel(address, credentials, options)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def close(self) -> None:
        """Ends the connection and every call that still runs; calls raise CANCELLED from then on."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, what: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def generate(self, request: pb.GenerateRequest, *, timeout: float | None = None) -> Generation:
        """Streams the messages of one generation; the last one of the stream has the summary."""
        seconds = self._seconds(timeout)
        with self._asking("Generate"):
            return Generation(self._stub.Generate(request, timeout=seconds), self._address)

    def complete(self, request: pb.GenerateRequest, *, timeout: float | None = None) -> Completion:
        """The whole answer at once."""
        completion, has_summary = Completion(), False
        for message in self.generate(request, timeout=timeout):
            if message.HasField("summary"):
                has_summary = True
                completion.summary = message.summary
            if message.index == 0:
                completion.text += message.text
                completion.token_ids += message.token_ids
                completion.finish_reason = message.finish_reason or completion.finish_reason
        if not has_summary:
            raise error.Error(grpc.StatusCode.DATA_LOSS, "the stream ended without its summary")
        return completion

    def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True,
                 timeout: float | None = None) -> list[int]:
        """The ids of `text`; with add_special_tokens as a prompt has them (BOS)."""
        request = pb.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        seconds = self._seconds(timeout)
        with self._asking("Tokenize"):
            return list(self._stub.Tokenize(request, timeout=seconds).ids)

    def detokenize(self, ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """The text of `ids`; what is no UTF-8 in it is replaced by U+FFFD."""
        request = pb.DetokenizeRequest(model=model, ids=ids)
        seconds = self._seconds(timeout)
        with self._asking("Detokenize"):
            return self._stub.Detokenize(request, timeout=seconds).text

    def list_models(self, *, timeout: float | None = None) -> list[pb.ModelCard]:
        """What the router serves, with the workers that are ready."""
        return list(self._ask_for_models(self._seconds(timeout), wait_for_ready=False).models)

    def check_ready(self, model: str = "", *, timeout: float = 10.0) -> None:
        """Returns if `model` (empty: any) can be served, else raises what is missing.

        UNAVAILABLE: ask again; FAILED_PRECONDITION: workers do not fit each other or the router, and none will come unless a
        process is started anew; DEADLINE_EXCEEDED: no answer within `timeout`.
        """
        try:
            response = self._ask_for_models(timeout, wait_for_ready=True)
        except error.Error as failure:
            if failure.code != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            raise error.Error(failure.code, "the router does not answer") from None
        missing = f"the router does not serve {'model ' + model if model else 'any model'}"
        served = [card.name for card in response.models]
        for card in response.models:
            if model in ("", card.name):
                if card.ready:
                    return
                missing = (f"{card.name} has {card.ready_prefill_workers} prefill and {card.ready_decode_workers} decode "
                           "workers ready")
        if model and served and model not in served:
            missing += f", it serves {', '.join(served)}"
        for sentences in (response.misfits, response.unreachable):
            missing += "".join(f"; {sentence}" for sentence in sentences[:_MAX_SENTENCES])
        raise error.Error(
            grpc.StatusCode.FAILED_PRECONDITION if response.misfits else grpc.StatusCode.UNAVAILABLE, missing)

    def wait_until_ready(self, model: str = "", *, timeout: float = 60.0) -> None:
        """Asks until `model` can be served; raises DEADLINE_EXCEEDED with the last answer."""
        deadline, last = time.monotonic() + _seconds(timeout), "the router does not answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                return self.check_ready(model, timeout=left)
            except error.Error as failure:
                if failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION):
                    last = failure.message
                elif failure.code != grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
            threading.Event().wait(min(_READY_POLL_S, max(0.0, deadline - time.monotonic())))
        raise error.Error(grpc.StatusCode.DEADLINE_EXCEEDED, f"not ready after {timeout:g} s: {last}")

    def _seconds(self, timeout: float | None) -> float:
        return _seconds(self._timeout if timeout is None else timeout)

    def _ask_for_models(self, timeout: float, *, wait_for_ready: bool) -> pb.ListModelsResponse:
        seconds = _seconds(timeout)
        with self._asking("ListModels"):
            return self._stub.ListModels(pb.ListModelsRequest(), timeout=seconds, wait_for_ready=wait_for_ready)

    @contextlib.contextmanager
    def _asking(self, method: str) -> Generator[None, None, None]:
        """Turns what gRPC raises in the block into ferry.Error."""
        try:
            yield
        except grpc.RpcError as failure:
            raise error.from_grpc(failure, self._address, method) from None
        except ValueError:  # of a closed channel, or of the request
            if not self._closed:
                raise
            raise error.Error(grpc.StatusCode.CANCELLED, "the client is closed") from None


def _seconds(timeout: float) -> float:
    """What gRPC takes for `timeout`: at most a day."""
    if math.isnan(timeout):
        raise ValueError("timeout is nan, it must be a number of seconds")
    return min(timeout, _MOST_SECONDS)


def _channel_options(max_attempts: int, first_backoff: float) -> list[tuple[str, str | int]]:
    options: list[tuple[str, str | int]] = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),  # two clients of one process do not share a connection
    ]
    if max_attempts == 1:
        return [*options, ("grpc.enable_retries", 0)]
    policy = {"maxAttempts": max_attempts, "initialBackoff": f"{first_backoff:.3f}s", "maxBackoff": f"{_MAX_BACKOFF_S:g}s",
              "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"]}
    config = {"methodConfig": [{"name": [{"service": "ferry.v1.Inference"}], "retryPolicy": policy}]}
    # A request that gRPC cannot keep is not made again; by default it keeps 256 KiB.
    return [*options, ("grpc.service_config", json.dumps(config)), ("grpc.per_rpc_retry_buffer_size", _MAX_MESSAGE_BYTES)]
