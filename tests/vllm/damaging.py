"""A connector that loads as ours does and then spoils every loaded block: a negative control."""

from __future__ import annotations

from typing import Any

from kvprism import StepPlan
from kvprism.vllm.connector import KVPrismConnector


class DamagingConnector(KVPrismConnector):
    """Overwrites what has arrived, before vLLM hears of it."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._caches = kv_caches
        self._blocks: dict[str, list[int]] = {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        for job, name in connector_metadata.loads:
            plan = StepPlan.decode(connector_metadata.plan)
            self._blocks[name] = plan.blocks(job)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for name in results.finished_recving:
            for block in self._blocks.pop(name, ()):
                for cache in self._caches.values():
                    for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
                        tensor[block].fill_(0.75)
        return results
