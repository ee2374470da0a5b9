"""Continuous batching of a torch model: requests join and leave between steps; one batch has prompts and decodes.

The layers call torch operators that write and read the planes of the cache. The arrays of the batch are torch tensors
that are made once; every `prepare` updates them.

Run it: python examples/torch_batching.py
"""

from collections import deque
from typing import Any

import torch
from torch import nn

from pagecore import AttentionSpec, PagedKVCache, Sequence
from pagecore.interop.torch import as_torch, paged_attention, write_kv

VOCABULARY, LAYERS, HEADS, KV_HEADS, DIM = 96, 2, 4, 2, 16
WIDTH, MAX_SEQUENCES, MAX_TOKENS, NEW = HEADS * DIM, 3, 64, 12


Planes = tuple[torch.Tensor, torch.Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden: torch.Tensor, planes: Planes, slots: torch.Tensor, attention_args: dict[str, Any]
    ) -> torch.Tensor:
        query, key, value = (
            self.project(self.norm(hidden)).unflatten(1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        )
        write_kv(key, value, *planes, slots)
        attended: torch.Tensor = paged_attention(query, *planes, **attention_args)
        return hidden + self.out(attended.flatten(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.scores = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        planes: list[Planes],
        slots: torch.Tensor,
        attention_args: dict[str, Any],
    ) -> torch.Tensor:
        hidden = self.tokens(ids) + self.positions(positions)
        for layer, own in zip(self.layers, planes, strict=True):
            hidden = layer(hidden, own, slots, attention_args)
        return self.scores(hidden)


class Engine:
    def __init__(self, model: Model) -> None:
        spec = AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS)
        self.model = model
        self.cache = PagedKVCache(spec, num_layers=LAYERS, num_blocks=64, max_sequences=MAX_SEQUENCES)
        self.batch = self.cache.make_batch(MAX_SEQUENCES, MAX_TOKENS)
        self.planes = [(as_torch(self.cache.key(i)), as_torch(self.cache.value(i))) for i in range(LAYERS)]
        self.positions, self.slots = as_torch(self.batch.positions), as_torch(self.batch.group(0).slot_mapping)
        self.attention_args = {
            "block_table": as_torch(self.cache.block_table(0), read_only=True),
            "seq_lens": as_torch(self.batch.seq_lens),
            "rows": as_torch(self.batch.rows),
            "cu_query_lens": as_torch(self.batch.cu_query_lens),
        }

    @torch.inference_mode()
    def step(self, sequences: list[Sequence]) -> None:
        """Compute the uncomputed tokens of each sequence, and append its next token."""
        news = [sequence.tokens[sequence.num_computed_tokens :] for sequence in sequences]
        self.cache.prepare(sequences, [len(new) for new in news], out=self.batch)
        ids = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        ids[: self.batch.num_tokens] = torch.cat([torch.from_numpy(new) for new in news])
        scores = self.model(ids, self.positions, self.planes, self.slots, self.attention_args)
        self.cache.commit(self.batch)
        last = self.attention_args["cu_query_lens"][1 : len(sequences) + 1] - 1
        self.cache.append_tokens(sequences, scores[last].argmax(dim=-1).numpy())

    def serve(self, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
        """Return the answer to each prompt, and the number of steps."""
        waiting, steps = deque(enumerate(prompts)), 0
        running: list[Any] = []
        answers: dict[int, list[int]] = {}
        while waiting or running:
            while waiting and len(running) < MAX_SEQUENCES:
                name, prompt = waiting.popleft()
                running.append(self.cache.add_sequence(prompt, id=name))
            self.step(running)
            steps += 1
            for sequence in [each for each in running if each.num_tokens >= len(prompts[each.id]) + NEW]:
                answers[sequence.id] = sequence.tokens[len(prompts[sequence.id]) :].tolist()
                running.remove(sequence)
                self.cache.remove(sequence)
        return [answers[name] for name in range(len(prompts))], steps


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is too small for several threads
    engine = Engine(Model().eval())
    prompts = [torch.randint(VOCABULARY, (length,)).tolist() for length in (5, 17, 2, 9, 12, 3, 20)]
    alone = [engine.serve([prompt])[0][0] for prompt in prompts]
    together, steps = engine.serve(prompts)
    for prompt, answer in zip(prompts, together, strict=True):
        print(f"{len(prompt):2} tokens -> {answer}")
    print(f"{len(prompts)} requests in {steps} steps, {len(prompts) * NEW} steps one by one")
    print(f"same tokens as alone: {together == alone}")


if __name__ == "__main__":
    main()
