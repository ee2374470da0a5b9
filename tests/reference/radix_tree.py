"""RadixTree in plain Python: nodes with lists, children in dictionaries, and the worst found by looking at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pagecore.errors import DoubleFree, InvalidBlock, ShapeError, UnsupportedOption

NULL = 0
Block = tuple[object, ...]  # the tokens of a block and the spans that overlap it: what it is looked up by


@dataclass
class Standing:
    used: int
    made: int
    priority: float = 35.0
    expiry: float = math.inf
    rank: float = 0.0
    hits: int = 0

    def key(self, policy: str) -> tuple[float, int]:
        return {
            "lru": (0.0, self.used),
            "lfu": (float(self.hits), self.used),
            "fifo": (0.0, self.made),
            "mru": (0.0, -self.used),
            "filo": (0.0, -self.made),
            "slru": (float(self.hits > 0), self.used),
            "priority": (self.priority, self.used),
            "rank": (self.rank, self.used),
        }[policy]


@dataclass(eq=False)
class Node:
    parent: Node | None
    blocks: list[Block]
    lanes: list[list[int]]
    standing: list[Standing]
    children: dict[Block, Node] = field(default_factory=dict)
    state: int | None = None

    @property
    def depth(self) -> int:
        return self.parent.end if self.parent else 0

    @property
    def end(self) -> int:
        return self.depth + len(self.blocks)

    def path(self) -> list[Node]:
        """From here up, without the root."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes


@dataclass(eq=False)
class Receipt:
    node: Node | None
    components: set[int]


def typed(value: object) -> object:
    return tuple(map(typed, value)) if type(value) is tuple else (type(value), value)


class RadixTree:
    """Twin of `pagecore.index.RadixTree`; lists in, lists and dictionaries out."""

    def __init__(
        self,
        block_size: int,
        full: int = 1,
        windows: tuple[int, ...] = (),
        states: bool = False,
        state_interval: int = 64,
        policy: str = "lru",
    ):
        self.block_size, self.full, self.states = block_size, full, states
        self.windows = [-(-window // block_size) for window in windows]
        self.num_lanes = full + len(windows)
        self.num_components = 1 + len(windows) + states
        self.state_interval, self.policy = state_interval, policy
        self.roots: dict[object, Node] = {}
        self.receipts: list[Receipt] = []
        self.turn, self.now = 0, -math.inf

    def blocks_of(self, tokens: list[int], spans: list[tuple[int, int, object]]) -> list[Block]:
        size = self.block_size
        blocks = []
        for first in range(0, len(tokens) // size * size, size):
            marks = [(s - first, e - first, d) for s, e, d in sorted(spans) if s < first + size and e > first]
            blocks.append((tuple(tokens[first : first + size]), tuple(marks)))
        return blocks

    def nodes(self) -> Iterator[Node]:
        left = [child for root in self.roots.values() for child in root.children.values()]
        while left:
            node = left.pop()
            left += node.children.values()
            yield node

    def root(self, namespace: object) -> Node:
        return self.roots.setdefault(typed(namespace), Node(None, [], [], []))

    def walk(self, namespace: object, blocks: list[Block]) -> list[tuple[Node, int]]:
        path: list[tuple[Node, int]] = []
        node = self.root(namespace)
        while blocks and blocks[0] in node.children:
            node = node.children[blocks[0]]
            equal = 0
            while equal < min(len(blocks), len(node.blocks)) and blocks[equal] == node.blocks[equal]:
                equal += 1
            path.append((node, equal))
            blocks = blocks[equal:]
            if equal < len(node.blocks):
                break
        return path

    # What a component holds, and what of it can go.

    def is_window(self, component: int) -> bool:
        return 1 <= component <= len(self.windows)

    def count(self, node: Node, component: int) -> int:
        if component == 0:
            return len(node.blocks)
        if self.is_window(component):
            return sum(block != NULL for block in node.lanes[self.full + component - 1])
        return int(node.state is not None)

    def window_start(self, component: int, end: int) -> int:
        return max(0, end - self.windows[component - 1])

    def pinned(self, component: int) -> set[Node]:
        nodes: set[Node] = set()
        for receipt in self.receipts:
            if receipt.node is None:
                continue
            if component == 0:
                nodes |= set(receipt.node.path())
            elif component in receipt.components:
                start = receipt.node.end - 1
                if self.is_window(component):
                    start = self.window_start(component, receipt.node.end)
                nodes |= {node for node in receipt.node.path() if node.end > start}
        return nodes

    def held(self, component: int) -> int:
        return sum(self.count(node, component) for node in self.nodes())

    def evictable(self, component: int) -> int:
        pinned = self.pinned(component)
        return sum(self.count(node, component) for node in self.nodes() if node not in pinned)

    # Looking up.

    def match(self, tokens, namespace=None, spans=(), max_tokens=None):
        blocks = self.blocks_of(tokens, spans)
        if max_tokens is not None:
            blocks = blocks[: max_tokens // self.block_size]
        path = self.walk(namespace, blocks)
        best: tuple[int, Node | None, int] = (0, None, 0)
        lanes: list[list[int]] = [[] for _ in range(self.num_lanes)]
        for node, matched in path:
            for i in range(matched):
                for lane, ids in zip(lanes, node.lanes, strict=True):
                    lane.append(ids[i])
                end = len(lanes[0])
                is_whole = all(
                    NULL not in lanes[self.full + w][max(0, end - window) :] for w, window in enumerate(self.windows)
                )
                has_state = not self.states or (i + 1 == len(node.blocks) and node.state is not None)
                if is_whole and has_state:
                    best = (end, node, i + 1)
        end, node, offset = best
        full = len(lanes[0])
        checkpoint = None
        if self.states:
            checkpoint = full * self.block_size // self.state_interval * self.state_interval
            checkpoint = checkpoint if checkpoint > end * self.block_size else None
        found = {
            "num_tokens": end * self.block_size,
            "num_full_tokens": full * self.block_size,
            "checkpoint": checkpoint,
            "state": node.state if node and self.states else None,
            "blocks": [lane[:end] for lane in lanes],
        }
        for c in range(1, len(self.windows) + 1):
            start = self.window_start(c, end)
            found["blocks"][self.full + c - 1][:start] = [NULL] * start
        return found, node, offset

    def split(self, node: Node, blocks: int) -> Node:
        upper = Node(
            node.parent,
            node.blocks[:blocks],
            [lane[:blocks] for lane in node.lanes],
            [replace(standing) for standing in node.standing],
        )
        assert node.parent is not None
        node.parent.children[upper.blocks[0]] = upper
        node.parent = upper
        node.blocks = node.blocks[blocks:]
        node.lanes = [lane[blocks:] for lane in node.lanes]
        upper.children[node.blocks[0]] = node
        return upper

    def split_path(self, node: Node, end: int) -> Node:
        while node.depth >= end:
            assert node.parent is not None
            node = node.parent
        return node if node.end == end else self.split(node, end - node.depth)

    def touch(self, node: Node, component: int, is_hit: bool) -> None:
        node.standing[component].used = self.turn
        node.standing[component].hits += is_hit

    def lock_end(self, node: Node, components: set[int], is_hit: bool) -> Receipt:
        for c in range(1, len(self.windows) + 1):
            start = self.window_start(c, node.end)
            if start and c in components:
                self.split_path(node, start)
        receipt = Receipt(node, components)
        self.receipts.append(receipt)
        for above in node.path():
            self.touch(above, 0, is_hit)
        for c in components - {0}:
            start = self.window_start(c, node.end) if self.is_window(c) else node.end - 1
            for above in node.path():
                if above.end > start:
                    self.touch(above, c, is_hit)
        return receipt

    def match_and_lock(self, tokens, namespace=None, spans=(), max_tokens=None, time=None):
        found, node, offset = self.match(tokens, namespace, spans, max_tokens)
        self.turn += 1
        self.advance(time)
        if node is None:
            self.receipts.append(Receipt(None, set(range(self.num_components))))
            return found, self.receipts[-1]
        if offset < len(node.blocks):
            node = self.split(node, offset)
        return found, self.lock_end(node, set(range(self.num_components)), True)

    def fork(self, receipt: Receipt) -> Receipt:
        self.receipts.append(Receipt(receipt.node, set(receipt.components)))
        return self.receipts[-1]

    def release(self, receipt: Receipt, component=None, time=None, rank=None) -> None:
        if not receipt.components:
            raise DoubleFree("twice")
        if component is not None and component not in receipt.components:
            raise DoubleFree("not held")
        self.turn += 1
        self.advance(time)
        self.drop(receipt, set(receipt.components) if component is None else {component}, rank)

    def drop(self, receipt: Receipt, components: set[int], rank: float | None) -> None:
        before = [self.pinned(c) for c in range(self.num_components)]
        receipt.components = receipt.components - components
        if not receipt.components:
            self.receipts.remove(receipt)
        for c in range(self.num_components):
            for node in before[c] - self.pinned(c):
                self.touch(node, c, False)
                if rank is not None:
                    node.standing[c].rank = rank

    def advance(self, time: float | None) -> None:
        self.now = self.now if time is None else max(self.now, time)

    # Keeping.

    def insert(
        self,
        tokens,
        lanes,
        states=(),
        namespace=None,
        spans=(),
        receipt=None,
        time=None,
        priority=None,
        time_to_live=None,
        rank=None,
    ):
        blocks = self.blocks_of(tokens, spans)
        if any(len(lane) < len(blocks) for lane in lanes):
            raise ShapeError("blocks")
        if states and not self.states:
            raise UnsupportedOption("states")
        lengths = [length for length, _ in states]
        if sorted(set(lengths)) != lengths or any(
            length % self.block_size or not 0 < length <= len(blocks) * self.block_size for length in lengths
        ):
            raise ShapeError("states")
        if receipt is not None and not receipt.components:
            raise DoubleFree("twice")
        path = self.walk(namespace, blocks)
        old = sum(matched for _, matched in path)
        taken: list[list[int]] = [[] for _ in range(self.num_lanes + 1)]
        duplicates: list[list[int]] = [[] for _ in range(self.num_lanes + 1)]
        for lane in range(self.num_lanes):
            mine = [block for node, matched in path for block in node.lanes[lane][:matched]]
            for i, offered in enumerate(lanes[lane][: len(blocks)]):
                if offered == NULL and (i < old or lane >= self.full):
                    continue
                if offered <= NULL:
                    raise InvalidBlock(str(offered))
                if i >= old or mine[i] == NULL:
                    taken[lane].append(offered)
                elif mine[i] != offered:
                    duplicates[lane].append(offered)
        ends = {node.end: node.state for node, matched in path if matched == len(node.blocks)}
        for length, state in states:
            mine_state = ends.get(length // self.block_size)
            if mine_state is None:
                taken[-1].append(state)
            elif mine_state != state:
                duplicates[-1].append(state)
        for lane, ids in enumerate(taken):
            held = self.ids(lane)
            if len(set(ids)) < len(ids) or held & set(ids):
                raise DoubleFree("held already")
        self.turn += 1
        self.advance(time)
        expiry = math.inf if time_to_live is None else time + time_to_live
        fresh = Standing(self.turn, self.turn)
        if priority is not None:
            fresh.priority, fresh.expiry = priority, expiry
        if rank is not None:
            fresh.rank = rank
        end = path[-1][0] if path else self.root(namespace)
        done = 0
        for node, matched in path:
            for lane in range(self.full, self.num_lanes):
                for i in range(matched):
                    node.lanes[lane][i] = node.lanes[lane][i] or lanes[lane][done + i]
            done += matched
        if old < len(blocks):
            if path and path[-1][1] < len(end.blocks):
                end = self.split(end, path[-1][1])
                path[-1] = (end, path[-1][1])
            leaf = Node(
                end,
                blocks[old:],
                [list(lane[old : len(blocks)]) for lane in lanes],
                [replace(fresh) for _ in range(self.num_components)],
            )
            end.children[blocks[old]] = end = leaf
        for node, _ in path:
            for standing in node.standing:
                standing.used = self.turn
                self.expire(standing)
                if priority is not None and priority >= standing.priority:
                    standing.priority, standing.expiry = priority, expiry
                if rank is not None:
                    standing.rank = rank
        for length, state in states:
            node = self.split_path(end, length // self.block_size)
            if node.state is None:
                node.state = state
                node.standing[-1] = replace(fresh)
        if receipt is not None and blocks:
            self.move(receipt, self.split_path(end, len(blocks)))
        return {
            "num_tokens": len(blocks) * self.block_size,
            "num_old_tokens": old * self.block_size,
            "taken": taken,
            "duplicates": duplicates,
        }

    def move(self, receipt: Receipt, end: Node) -> None:
        if receipt.node is end:
            return
        components = (receipt.components | {0}) - ({self.num_components - 1} if self.states else set())
        self.turn += 1
        self.drop(receipt, set(receipt.components), None)
        self.turn += 1
        self.receipts.remove(self.lock_end(end, components, False))
        receipt.node, receipt.components = end, components
        self.receipts.append(receipt)

    def ids(self, lane: int) -> set[int]:
        if lane == self.num_lanes:
            return {node.state for node in self.nodes() if node.state is not None}
        return {block for node in self.nodes() for block in node.lanes[lane] if block != NULL}

    # Single blocks.

    def place(self, receipt: Receipt, index: int, lane: int) -> tuple[list[int], int]:
        for node in receipt.node.path() if receipt.node else []:
            if node.depth <= index < node.end:
                return node.lanes[lane], index - node.depth
        raise ShapeError(str(index))

    def block_at(self, receipt: Receipt, index: int, lane: int = 0) -> int:
        ids, at = self.place(receipt, index, lane)
        return ids[at]

    def replace(self, receipt: Receipt, index: int, block: int, lane: int = 0) -> int:
        if block < 0 or (block == NULL and lane < self.full):
            raise InvalidBlock(str(block))
        ids, at = self.place(receipt, index, lane)
        old = ids[at]
        if block not in (NULL, old) and block in self.ids(lane):
            raise DoubleFree(str(block))
        ids[at] = block
        return old

    # Giving up.

    def evict(self, component: int, amount: int, time: float | None = None):
        if amount < 0:
            raise ShapeError(str(amount))
        self.advance(time)
        left = amount = min(amount, self.evictable(component))
        out: list[list[int]] = [[] for _ in range(self.num_lanes + 1)]
        while left:
            pinned = self.pinned(component)
            can_go = [
                node
                for node in self.nodes()
                if node not in pinned and self.count(node, component) and not (component == 0 and node.children)
            ]
            for node in can_go:
                self.expire(node.standing[component])
            node = min(can_go, key=lambda node: (*node.standing[component].key(self.policy), node.depth))
            gone = min(left, self.count(node, component))
            left -= gone
            self.give_up(node, component, gone, out)
        return amount, out

    def expire(self, standing: Standing) -> None:
        if standing.expiry <= self.now:
            standing.priority, standing.expiry = 35.0, math.inf

    def give_up(self, node: Node, component: int, amount: int, out: list[list[int]]) -> None:
        if component == 0:
            assert node.parent is not None
            for lane, ids in enumerate(node.lanes):
                out[lane] += [block for block in reversed(ids[len(ids) - amount :]) if block != NULL]
                del ids[len(ids) - amount :]
            first = node.blocks[0]
            del node.blocks[len(node.blocks) - amount :]
            if not node.blocks:
                del node.parent.children[first]
        elif self.is_window(component):
            ids = node.lanes[self.full + component - 1]
            present = [i for i, block in enumerate(ids) if block != NULL][:amount]
            out[self.full + component - 1] += [ids[i] for i in present]
            for i in present:
                ids[i] = NULL
            return
        if node.state is not None:
            out[-1].append(node.state)
            node.state = None
