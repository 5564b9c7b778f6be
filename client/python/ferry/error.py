"""The one exception of the SDK."""
from __future__ import annotations

from typing import cast

import grpc

from ferry.v1 import error_pb2


class Error(Exception):
    """A call failed.

    code: what kind of failure (grpc.StatusCode); message: the router's sentence; reason: a word for programs where the
    router gave one ("QUEUE_FULL", ...), else "".
    """

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "") -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason


def from_grpc(error: grpc.RpcError) -> Error:
    """The Error of what a call of grpc has raised."""
    call = cast(grpc.Call, error)
    reason = ""
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            reason = _reason(value)
    return Error(call.code(), call.details() or "", reason)


def _reason(details: bytes) -> str:
    for detail in error_pb2.RpcStatus.FromString(details).details:
        if detail.type_url.endswith("/google.rpc.ErrorInfo"):
            return error_pb2.ErrorInfo.FromString(detail.value).reason
    return ""
