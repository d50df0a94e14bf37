"""PEFT folders as one engine takes them: of its model, in its pages, with ranks that it allows."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable

import numpy as np

from slora_jax.config import ModelConfig
from slora_jax.errors import AdapterError
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.packing import AdapterShape, PackedAdapter, pack_adapter
from slora_jax.lora.peft import promised_ranks, read_adapter
from slora_jax.lora.peft_folder import folder_stamp
from slora_jax.lora.transfer import HostCopy
from slora_jax.memory.layout import RANK_BLOCK, PageLayout


@dataclasses.dataclass(frozen=True)
class AdapterReader:
    """Reads adapters for one engine, in any thread, and keeps nothing of them. `dtype` is the pool's;
    `host_copy` makes an adapter's pages ready to be copied to the device.
    """

    model_config: ModelConfig
    layout: PageLayout
    dtype: np.dtype
    max_rank: int
    host_copy: Callable[[np.ndarray], HostCopy]

    def prepare(
        self, path: str | os.PathLike[str], checkpoint: Callable[[], None] = lambda: None
    ) -> PreparedAdapter:
        """Read, validate and pack a PEFT folder; raises AdapterError with the reason.

        `checkpoint()` is called between two tensors and steps; what it raises ends the work and is raised.
        """
        stamp = folder_stamp(path)
        adapter = read_adapter(path, self.model_config, max_rank=self.max_rank, checkpoint=checkpoint)
        packed = pack_adapter(adapter, self.layout, self.dtype, checkpoint=checkpoint)
        if folder_stamp(path) != stamp:
            raise AdapterError("its files changed while they were read; load it again", folder=stamp.folder)
        content = np.ascontiguousarray(packed.pages).view(np.uint8)
        stamp = dataclasses.replace(stamp, checksum=zlib.crc32(content))
        checkpoint()
        return PreparedAdapter(os.fspath(path), packed, stamp, self.host_copy(packed.pages))

    def promised_shape(self, path: str | os.PathLike[str]) -> AdapterShape:
        """What adapter_config.json says that `prepare` will find; raises AdapterError with the reason."""
        ranks = promised_ranks(path, self.model_config, max_rank=self.max_rank)
        return AdapterShape(self.layout.adapter(ranks), max(ranks.values()), tuple(ranks))

    def check_form(self, name: str, packed: PackedAdapter) -> None:
        """Raise ValueError for one that was packed for an engine of another kind."""
        layout, pages = self.layout, packed.pages
        own = layout.adapter({m: RANK_BLOCK * n for m, n in packed.layout.rank_blocks.items() if n})
        form = (layout.n_layers, packed.layout.num_pages, layout.tp * layout.page_elems), self.dtype, own
        if (pages.shape, pages.dtype, packed.layout) != form:
            raise ValueError(
                f"adapter '{name}' was prepared for an engine of another model, dtype, page_tokens or "
                "tensor_parallel_size: prepare it with this one"
            )
        if packed.rank > self.max_rank:
            raise ValueError(
                f"adapter '{name}' has rank {packed.rank}, max_lora_rank is {self.max_rank}: raise it"
            )
