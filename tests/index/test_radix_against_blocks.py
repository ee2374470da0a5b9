"""RadixTree against a model without nodes: every block has an age and hits of its own."""

import random
from dataclasses import dataclass, field

import pytest

from pagecore.index import RadixTree
from tests.together import together

ORDERS = {
    "lru": lambda block: block.used,
    "mru": lambda block: -block.used,
    "lfu": lambda block: (block.hits, block.used),
    "slru:1": lambda block: (block.hits > 0, block.used),
    "slru:0": lambda block: block.used,
}


@dataclass(eq=False)
class Block:
    id: int
    parent: "Block | None" = None
    token: int = -1
    used: int = 0
    hits: int = 0
    pins: int = 0
    children: dict = field(default_factory=dict)


class Blocks:
    """A tree of single blocks of one token; each call is a turn, and a prompt that moves its pins takes two."""

    def __init__(self, policy):
        self.order, self.root, self.turn = ORDERS[policy], Block(0), 0

    def walk(self, tokens):
        path, at = [], self.root
        while len(path) < len(tokens) and tokens[len(path)] in at.children:
            at = at.children[tokens[len(path)]]
            path.append(at)
        return path

    def use(self, path):
        self.turn += 1
        for block in path:
            block.used = self.turn

    def lock(self, tokens):
        path = self.walk(tokens)
        self.use(path)
        for block in path:
            block.hits += 1
            block.pins += 1
        return path

    def release(self, path):
        for block in path:
            block.pins -= 1
        self.use([block for block in path if not block.pins])

    def insert(self, tokens, ids):
        """Return the path of the tokens, and the ids that the tree takes."""
        path = self.walk(tokens)
        known = len(path)
        for token, block in list(zip(tokens, ids, strict=True))[known:]:
            parent = path[-1] if path else self.root
            path.append(Block(block, parent, token))
            parent.children[token] = path[-1]
        self.use(path)
        return path, ids[known:]

    def move(self, old, new):
        """Let a receipt that pinned the path `old` pin `new`."""
        for block in new:
            block.pins += 1
        self.release(old)

    def leaves(self):
        waiting = list(self.root.children.values())
        while waiting:
            block = waiting.pop()
            if not block.children and not block.pins:
                yield block
            waiting += block.children.values()

    def evict(self, amount):
        gone = []
        while len(gone) < amount and (block := min(self.leaves(), key=self.order, default=None)):
            del block.parent.children[block.token]
            gone.append(block.id)
        return gone


@pytest.mark.parametrize("policy", sorted(ORDERS))
@together("seed", range(40))
def test_blocks_are_evicted_in_the_order_of_their_own_use(policy, seed):
    drawn = random.Random(seed)
    tree, model, live, number = RadixTree(block_size=1, policy=policy), Blocks(policy), [], 1

    def tokens_of(count):
        return [drawn.randrange(2) for _ in range(count)]

    for _ in range(60):
        call = drawn.choice(["add", "add", "publish", "publish", "insert", "remove", "evict"])
        if call == "add":
            tokens = tokens_of(drawn.randint(1, 8))
            live.append((tree.match_and_lock(tokens), model.lock(tokens), tokens))
        elif call == "publish" and live:
            i = drawn.randrange(len(live))
            receipt, path, tokens = live[i]
            tokens = tokens + tokens_of(drawn.choice([0, 0, 3]))
            end = drawn.randint(len(path), len(tokens))
            if end == len(path):
                continue
            ids = list(range(number, number + end))
            number += end
            new, taken = model.insert(tokens[:end], ids)
            assert tree.extend(tokens[:end], ids, receipt).taken.tolist() == taken
            model.move(path, new)
            live[i] = (receipt, new, tokens)
        elif call == "insert":
            tokens = tokens_of(drawn.randint(1, 8))
            ids = list(range(number, number + len(tokens)))
            number += len(tokens)
            assert tree.insert(tokens, ids).taken.tolist() == model.insert(tokens, ids)[1]
        elif call == "remove" and live:
            receipt, path, _ = live.pop(drawn.randrange(len(live)))
            receipt.release()
            model.release(path)
        elif call == "evict":
            amount = drawn.randint(1, 3)
            assert tree.evict("full", amount).blocks.tolist() == model.evict(amount)
    for receipt, path, _ in live:
        receipt.release()
        model.release(path)
    assert tree.evict("full", 999).blocks.tolist() == model.evict(999)
    tree.check_invariants()
