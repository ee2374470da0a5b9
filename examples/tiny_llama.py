"""A small Llama with random weights, for the examples of engines: RMSNorm, rotary embeddings, grouped-query attention.

The model knows no cache. `forward` takes the tokens of a step as a flat batch, and a function that attends. `dense` is
such a function for one whole text, so that any engine can be compared with the same model without a cache.

Run it: python examples/tiny_llama.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, DIM, HIDDEN = 256, 64, 3, 4, 2, 16, 160
# (layer, query [T, HEADS, DIM], key [T, KV_HEADS, DIM], value [T, KV_HEADS, DIM]) -> [T, HEADS, DIM]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Return queries or keys ``[T, heads, DIM]`` with rotary embeddings of their positions (RoFormer, 2021)."""
    frequencies = 10000.0 ** (-torch.arange(0, DIM, 2, device=x.device) / DIM)
    angles = positions[:, None, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor, number: int, attend: Attend) -> Tensor:
        heads = self.qkv(self.attention_norm(hidden)).unflatten(1, (-1, DIM))
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        attended = attend(number, rotate(query, positions), rotate(key, positions), value)
        hidden = hidden + self.out(attended.flatten(1))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(silu(gate) * up)


class TinyLlama(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        random = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=random)

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Return the logits ``[T, VOCABULARY]`` of a flat batch of T tokens, or of some of its rows."""
        hidden = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, number, attend)
        return self.head(self.norm(hidden if rows is None else hidden[rows]))

    def logits(self, text: Tensor) -> Tensor:
        """Return the logits ``[T, VOCABULARY]`` of one whole text, computed without a cache."""
        return self(text, torch.arange(len(text)), dense)


def dense(_layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend within one text: each token to itself and to the tokens before it."""
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(0, 1)


def sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw the next token of each row of ``logits [n, VOCABULARY]``; argmax of logits plus Gumbel noise.

    The noise is a hash of the row's seed and of the position of the drawn token. A token therefore does not depend on
    the batch in which it is computed, nor on when it is. Rows with a seed below 0 are greedy.
    """
    bits = (seeds[:, None] * 0x9E3779B1 + positions[:, None]) * VOCABULARY + torch.arange(VOCABULARY)
    for _ in range(2):
        bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    uniform = ((bits ^ (bits >> 16)) & 0xFFFFFF).add(0.5) / 2**24
    noise = -(-uniform.log()).log()
    return (logits + noise * (seeds[:, None] >= 0)).argmax(dim=-1)


def first_difference(model: TinyLlama, text: Tensor, num_prompt_tokens: int, seed: int) -> int | None:
    """Return the position of the first generated token that the model without a cache would not draw, or None."""
    drawn_at = torch.arange(num_prompt_tokens, len(text))
    expected = sample(model.logits(text)[drawn_at - 1], torch.full_like(drawn_at, seed), drawn_at)
    wrong = (expected != text[drawn_at]).nonzero()
    return None if len(wrong) == 0 else int(drawn_at[wrong[0, 0]])


def main() -> None:
    model = TinyLlama().eval()
    text = torch.arange(10)
    for _ in range(20):
        at = torch.tensor([len(text)])
        text = torch.cat([text, sample(model.logits(text)[-1:], torch.tensor([7]), at)])
    print("generated without a cache:", text[10:].tolist())
    print("the model draws the same tokens again:", first_difference(model, text, 10, 7) is None)


if __name__ == "__main__":
    main()
