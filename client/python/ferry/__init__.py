"""Python SDK of Ferry.

    import ferry

    with ferry.Client("127.0.0.1:8500") as client:
        request = ferry.GenerateRequest(text="The ferry left at dawn", sampling=ferry.SamplingParams(max_tokens=64))
        for message in client.generate(request):
            print(message.text, end="", flush=True)
"""
from ferry.client import Client, Completion, Generation
from ferry.error import Error
from ferry.v1.inference_pb2 import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    GenerateSummary,
    ModelCard,
    SamplingParams,
    TokenIds,
)

__all__ = [
    "Client", "Completion", "Error", "FinishReason", "GenerateRequest", "GenerateResponse", "GenerateSummary",
    "Generation", "ModelCard", "SamplingParams", "TokenIds",
]
