"""vLLM 0.33's Scheduler, which the bench "scheduler" takes as a control where vLLM can be imported."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.peers import unimportable
from bench.peers.vllm import FOLDER, NAME, RECIPE, find_vllm

__all__ = ["NAME", "PeerScheduler"]

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 1024,
    "torch_dtype": "float16",
}


@cache
def load() -> Any:
    """Return the names that the scheduler needs; raises PeerMissing."""
    find_vllm()
    try:
        import torch
        from vllm import config
        from vllm.sampling_params import SamplingParams
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager
    except ImportError as error:
        raise unimportable(NAME, FOLDER, error, RECIPE) from error
    return SimpleNamespace(
        torch=torch,
        config=config,
        sampling=SamplingParams,
        interface=kv_cache_interface,
        scheduler=Scheduler,
        drafts=DraftTokenIds,
        output=ModelRunnerOutput,
        request=Request,
        structured=StructuredOutputManager,
    )


class PeerScheduler:
    """vLLM's scheduler without prefix caching; `step` is schedule and update_from_output.

    `verify` also is update_draft_token_ids, with the ids of each request in a list.
    """

    def __init__(self, rows: int, num_blocks: int, max_tokens: int, block_size: int, length: int) -> None:
        self._vllm = vllm = load()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps({**MODEL, "max_position_embeddings": 2 * length}))
            model = vllm.config.ModelConfig(
                model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=2 * length
            )
        cache_config = vllm.config.CacheConfig(block_size=block_size, enable_prefix_caching=False)
        cache_config.num_gpu_blocks = num_blocks
        scheduling = vllm.config.SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max_tokens,
            max_model_len=2 * length,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        )
        whole = vllm.config.VllmConfig(scheduler_config=scheduling, model_config=model, cache_config=cache_config)
        spec = vllm.interface.FullAttentionSpec(
            block_size=block_size, num_kv_heads=8, head_size=128, dtype=vllm.torch.bfloat16
        )
        groups = [vllm.interface.KVCacheGroupSpec(["layer"], spec)]
        blocks = vllm.interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self._scheduler = vllm.scheduler(
            vllm_config=whole,
            kv_cache_config=blocks,
            structured_output_manager=vllm.structured(whole),
            block_size=block_size,
        )

    def add(self, number: int, prompt: int, new: int) -> None:
        """Queue a request whose tokens are all `number`."""
        sampling = self._vllm.sampling(max_tokens=new, ignore_eos=True)
        self._scheduler.add_request(
            self._vllm.request(
                request_id=str(number),
                prompt_token_ids=[number] * prompt,
                sampling_params=sampling,
                pooling_params=None,
            )
        )

    def step(self) -> int | None:
        """Run one step; return the number of sampled tokens, None at the end."""
        step = self._scheduler.schedule()
        self._update(step, [[0]] * len(step.num_scheduled_tokens))
        return len(step.num_scheduled_tokens) or None

    def verify(self, drafts: int, accepted: list[int]) -> None:
        """Run one step with drafts for every request, all of which decode; `accepted` is what each gains."""
        names = [request.request_id for request in self._scheduler.running]
        proposed = self._vllm.drafts(req_ids=names, draft_token_ids=[[0] * drafts for _ in names])
        self._scheduler.update_draft_token_ids(proposed)
        self._update(self._scheduler.schedule(), [[0] * count for count in accepted])

    def _update(self, step: Any, ids: list[list[int]]) -> None:
        names = list(step.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        output = self._vllm.output(req_ids=names, req_id_to_index=places, sampled_token_ids=ids)
        self._scheduler.update_from_output(step, output)
