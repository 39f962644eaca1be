"""vLLM connector: stores and loads the KV cache of hybrid models through Mooncake.

``--kv-transfer-config '{"kv_connector": "KVPrismConnector", "kv_connector_module_path":
"kvprism.vllm", "kv_role": "kv_both", "kv_connector_extra_config": {"master_server_address":
"127.0.0.1:50051"}}'``. Options are listed in docs/vllm.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cache_config import register_spec

if TYPE_CHECKING:
    from .connector import KVPrismConnector

__all__ = ["KVPrismConnector", "register_spec"]


def __getattr__(name: str) -> Any:
    # What only reads options or describes a cache needs no vLLM.
    if name == "KVPrismConnector":
        from .contract import check_imports

        check_imports()
        from .connector import KVPrismConnector

        return KVPrismConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
