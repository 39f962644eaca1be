"""vLLM's entry point: makes the connector known by its name, without a module path."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once; imports no connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(
            "KVPrismConnector", "kvprism.vllm", "KVPrismConnector"
        )
    except ValueError:
        return  # registered before
