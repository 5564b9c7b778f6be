"""The one exception of the SDK."""
from __future__ import annotations

from typing import cast

import grpc

from ferry.v1 import error_pb2


class Error(Exception):
    """A call failed.

    code: what kind of failure (grpc.StatusCode); message: the router's sentence; reason: a word for programs where the
    router gave one ("QUEUE_FULL", ...), else ""; retry_after: in how many seconds the router asks to come back, else None.
    """

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.retry_after = retry_after


def from_grpc(error: grpc.RpcError, address: str, method: str) -> Error:
    """The Error of what the call of `method` at `address` has raised."""
    call = cast(grpc.Call, error)
    message = call.details()
    if not message and call.code() == grpc.StatusCode.UNIMPLEMENTED:  # all that a worker says of a router's methods
        message = f"{address} is no router: it does not serve Inference.{method}; give the router's address"
    reason = ""
    retry_after: float | None = None
    for key, value in call.trailing_metadata() or ():
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        for detail in error_pb2.RpcStatus.FromString(value).details:
            if detail.type_url.endswith("/google.rpc.ErrorInfo"):
                reason = error_pb2.ErrorInfo.FromString(detail.value).reason
            elif detail.type_url.endswith("/google.rpc.RetryInfo"):
                delay = error_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after = delay.ToTimedelta().total_seconds()
    return Error(call.code(), message or call.code().name.lower(), reason, retry_after)
