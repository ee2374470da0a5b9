"""RadixTree in plain Python: nodes with lists, children in dictionaries, linear search for the worst node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace

from pagecore.errors import DoubleFree, InvalidBlock, ShapeError, UnsupportedOption

NULL = 0
Block = tuple[object, ...]  # lookup key: the tokens of a block and the spans that overlap it


@dataclass
class EvictionState:
    used: int
    made: int
    priority: float = 35.0
    expiry: float = math.inf
    rank: float = 0.0
    hits: int = 0
    clock: int = 0
    weight: int = 0
    is_branch: bool = False
    has_next: bool = False
    is_passed: bool = False
    is_reused: bool = False
    after_state: int = 0
    after_branch: int = 0
    evicted_after: int = 0

    @property
    def is_learned(self) -> bool:
        return not self.is_branch and not self.is_passed

    @property
    def deadline(self) -> int:
        if self.is_branch:
            return self.clock + 16 * 24 * (1 + min(self.hits, 7)) * self.after_branch
        if self.is_passed:
            return self.clock + self.after_state
        return self.clock + self.weight * (self.after_state if self.has_next else self.after_branch)

    def key(self, policy: str) -> tuple[float, int]:
        return {
            "lru": (float(self.deadline), self.used),
            "lfu": (float(self.hits), self.used),
            "fifo": (0.0, self.made),
            "mru": (0.0, -self.used),
            "filo": (0.0, -self.made),
            "slru": (float(self.is_branch or (self.hits > 0 and not self.is_passed)), self.used),
            "priority": (self.priority, self.used),
            "rank": (self.rank, self.used),
        }[policy]


class ReuseRates:
    """Shares of states that were reused: of those that continue a sequence, and of those with a later state."""

    def __init__(self) -> None:
        self.ended, self.reused = [16, 16], [10, 3]

    def weight(self, state: EvictionState) -> int:
        kind = int(state.has_next)
        share = max(1, 256 * min(self.reused[kind], self.ended[kind]) // self.ended[kind])
        return max(weight for weight in (m << k for m in (1, 2, 3) for k in range(9)) if weight <= share)

    def count_end(self, state: EvictionState) -> None:
        kind = int(state.has_next)
        if not state.is_learned:
            return
        self.ended[kind] += 1
        if self.ended[kind] == 256:
            self.ended[kind], self.reused[kind] = 128, self.reused[kind] // 2

    def count_reuse(self, state: EvictionState) -> None:
        if state.is_learned and not state.is_reused:
            state.is_reused = True
            self.reused[int(state.has_next)] += 1


@dataclass(eq=False)
class Node:
    parent: Node | None
    blocks: list[Block]
    lanes: list[list[int]]
    eviction: list[EvictionState]
    run: object  # identity of the insertion: equal for both halves of a split
    children: dict[Block, Node] = field(default_factory=dict)
    state: int | None = None

    @property
    def depth(self) -> int:
        return self.parent.end if self.parent else 0

    @property
    def end(self) -> int:
        return self.depth + len(self.blocks)

    def path(self) -> list[Node]:
        """Return the nodes from here up, without the root."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes


# Policies that look at insertions, or at hits since then.
BY_INSERTION = ("fifo", "filo", "lfu", "slru")
BY_HITS = ("lfu", "slru")


@dataclass(eq=False)
class Receipt:
    node: Node | None
    components: set[int]
    namespace: object = None
    since: int = 0  # turn in which its first nodes were pinned; forks keep it


def typed(value: object) -> object:
    """Return a key that is equal only for values of equal types, at every depth."""
    parts: object = None
    if isinstance(value, tuple):
        parts = tuple(map(typed, value))
    elif isinstance(value, frozenset):
        parts = frozenset(map(typed, value))
    elif is_dataclass(value):
        parts = tuple(typed(getattr(value, each.name)) for each in fields(value))
    return type(value), value, parts


class RadixTree:
    """Twin of `pagecore.index.RadixTree`; lists in, lists and dictionaries out."""

    def __init__(
        self,
        block_size: int,
        full: int = 1,
        windows: tuple[int, ...] = (),
        chunks: tuple[int, ...] = (),
        sinks: tuple[int, ...] = (),
        states: bool = False,
        state_interval: int = 64,
        min_kept: int = 0,
        policy: str = "lru",
    ):
        self.block_size, self.full, self.states = block_size, full, states
        none = [0] * len(windows)
        self.windows = list(zip(windows, chunks or none, strict=True))
        self.sinks = list(sinks or none)
        self.num_lanes = full + len(windows)
        self.num_components = 1 + len(windows) + states
        self.state_interval = state_interval
        self.min_kept = min_kept
        self.policy, _, share = policy.partition(":")
        self.protected_share = float(share or 0.1)
        self.roots: dict[object, Node] = {}
        self.namespaces: dict[object, object] = {}  # by key
        self.receipts: list[Receipt] = []
        self.turn, self.clock, self.now = 0, 0, -math.inf
        self.rates = ReuseRates()

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

    def prefixes(self) -> Iterator[tuple[object, list[int], list[tuple[int, int, object]]]]:
        """Yield namespace, tokens and spans of the prefix that ends with each leaf."""
        for key, root in self.roots.items():
            left = [(child, list[Block]()) for child in root.children.values()]
            while left:
                node, blocks = left.pop()
                blocks = blocks + node.blocks
                left += [(child, blocks) for child in node.children.values()]
                if not node.children:
                    yield (
                        self.namespaces[key],
                        [token for tokens, _ in blocks for token in tokens],
                        self.spans_of(blocks),
                    )

    def spans_of(self, blocks: list[Block]) -> list[tuple[int, int, object]]:
        size = self.block_size
        return sorted({(s + i * size, e + i * size, d) for i, (_, marks) in enumerate(blocks) for s, e, d in marks})

    def root(self, namespace: object) -> Node:
        self.namespaces[typed(namespace)] = namespace
        return self.roots.setdefault(typed(namespace), Node(None, [], [], [], None))

    def walk(self, node: Node, blocks: list[Block]) -> list[tuple[Node, int]]:
        path: list[tuple[Node, int]] = []
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

    # Contents and pins of components.

    def is_window(self, component: int) -> bool:
        return 1 <= component <= len(self.windows)

    def count(self, node: Node, component: int) -> int:
        if component == 0:
            return len(node.blocks)
        if self.is_window(component):
            return sum(block != NULL for block in node.lanes[self.full + component - 1])
        return int(node.state is not None)

    def window_start(self, component: int, end: int) -> int:
        """Return the first block that a prefix of `end` blocks needs after its sinks; 0 if nothing is between them."""
        seen, chunk = self.windows[component - 1]
        needed = [
            token
            for token in range(end * self.block_size)
            if token >= end * self.block_size - seen
            or (chunk and (token + 1 > (max(0, end * self.block_size - seen)) // chunk * chunk))
        ]
        start = needed[0] // self.block_size if needed else end
        return 0 if start <= self.sink_blocks(component) else start

    def sink_blocks(self, component: int) -> int:
        return -(-self.sinks[component - 1] // self.block_size) if self.is_window(component) else 0

    def needs(self, component: int, end: int, node: Node) -> bool:
        """Return True if a prefix of `end` blocks needs ids of a node on its path."""
        start = self.window_start(component, end) if self.is_window(component) else end - 1
        return node.end > start or node.depth < self.sink_blocks(component)

    def cut(self, component: int, end: Node) -> None:
        """Split a path where the window begins and where its sinks end."""
        if start := self.window_start(component, end.end):
            self.split_path(end, start)
            if sinks := self.sink_blocks(component):
                self.split_path(end, sinks)

    def pins(self, component: int) -> Counter[Node]:
        """Return the number of receipts that pin a component, by node."""
        nodes: Counter[Node] = Counter()
        for receipt in self.receipts:
            if receipt.node is None:
                continue
            if component == 0:
                nodes.update(receipt.node.path())
            elif component in receipt.components:
                end = receipt.node.end
                nodes.update(node for node in receipt.node.path() if self.needs(component, end, node))
        return nodes

    def pinned(self, component: int) -> set[Node]:
        return set(self.pins(component))

    def held(self, component: int) -> int:
        return sum(self.count(node, component) for node in self.nodes())

    def evictable(self, component: int) -> int:
        pinned = self.pinned(component)
        return sum(self.count(node, component) for node in self.nodes() if node not in pinned)

    # Lookup.

    def match(self, tokens, namespace=None, spans=(), max_tokens=None):
        blocks = self.blocks_of(tokens, spans)
        if max_tokens is not None:
            blocks = blocks[: max_tokens // self.block_size]
        path = self.walk(self.root(namespace), blocks)
        best: tuple[int, Node | None, int] = (0, None, 0)
        lanes: list[list[int]] = [[] for _ in range(self.num_lanes)]
        full = sum(matched for _, matched in path)
        for node, matched in path:
            for i in range(matched):
                for lane, ids in zip(lanes, node.lanes, strict=True):
                    lane.append(ids[i])
                end = node.depth + i + 1
                is_whole = all(
                    NULL not in lanes[self.full + w][self.window_start(w + 1, end) :]
                    and NULL not in lanes[self.full + w][: self.sink_blocks(w + 1)]
                    for w in range(len(self.windows))
                )
                has_state = not self.states or (i + 1 == len(node.blocks) and node.state is not None)
                if is_whole and has_state:
                    best = (end, node, i + 1)
        end, node, offset = best
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
            kept = min(start, self.sink_blocks(c))
            found["blocks"][self.full + c - 1][kept:start] = [NULL] * (start - kept)
        # Without windows, layers that attend need no more than the blocks.
        is_longer = self.states and not self.windows and self.full > 0
        found["num_shared_tokens"] = full * self.block_size if is_longer else found["num_tokens"]
        found["shared_blocks"] = lanes if is_longer else found["blocks"]
        return found, node, offset

    def split(self, node: Node, blocks: int) -> Node:
        upper = Node(
            node.parent,
            node.blocks[:blocks],
            [lane[:blocks] for lane in node.lanes],
            [replace(eviction) for eviction in node.eviction],
            node.run,
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
        self.use(node.eviction[component])
        node.eviction[component].hits += is_hit

    def use(self, eviction: EvictionState) -> None:
        eviction.used, eviction.clock, eviction.weight = self.turn, self.clock, self.rates.weight(eviction)

    def fresh(self) -> EvictionState:
        eviction = EvictionState(self.turn, self.turn)
        self.use(eviction)
        return eviction

    def lock_end(self, node: Node, components: set[int], is_hit: bool, namespace: object) -> Receipt:
        for c in range(1, len(self.windows) + 1):
            if c in components:
                self.cut(c, node)
        receipt = Receipt(node, components, namespace, self.turn)
        self.receipts.append(receipt)
        for above in node.path():
            self.touch(above, 0, is_hit)
        for c in components - {0}:
            for above in node.path():
                if self.needs(c, node.end, above):
                    self.touch(above, c, is_hit)
        return receipt

    def match_and_lock(self, tokens, namespace=None, spans=(), max_tokens=None, time=None):
        found, node, offset = self.match(tokens, namespace, spans, max_tokens)
        self.turn += 1
        self.advance(time)
        self.note_reuse(tokens, namespace, spans, max_tokens, node)
        if node is None:
            self.receipts.append(Receipt(None, set(range(self.num_components)), namespace, self.turn))
            return found, self.receipts[-1]
        if offset < len(node.blocks):
            node = self.split(node, offset)
        receipt = self.lock_end(node, set(range(self.num_components)), True, namespace)
        self.prune()
        if self.policy == "slru":
            for c in range(1 + len(self.windows)):
                self.limit_reused(c)
        return found, receipt

    def limit_reused(self, component: int) -> None:
        """Let nodes with hits lose them, the least recently used first, while the others have the protected share."""
        limit = self.protected_share * self.held(component)
        while True:
            held = [node for node in self.nodes() if self.count(node, component)]
            reused = [node for node in held if node.eviction[component].hits]
            if not reused:
                return
            oldest = min(reused, key=lambda node: (node.eviction[component].used, -node.depth))
            if sum(self.count(node, component) for node in reused if node is not oldest) < limit:
                return
            self.turn += 1
            oldest.eviction[component].hits, oldest.eviction[component].used = 0, self.turn

    def note_reuse(self, tokens, namespace, spans, max_tokens, found: Node | None) -> None:
        """Count the state of a match as reused, and the deepest evicted one after it."""
        if not self.states:
            return
        if found is not None:
            self.rates.count_reuse(found.eviction[-1])
        blocks = self.blocks_of(tokens, spans)[: None if max_tokens is None else max_tokens // self.block_size]
        path = [node for node, matched in self.walk(self.root(namespace), blocks) if matched == len(node.blocks)]
        after = path[path.index(found) + 1 :] if found is not None else path
        gone = [node for node in after if node.eviction[-1].evicted_after == node.end]
        if gone:
            self.rates.count_reuse(gone[-1].eviction[-1])

    def fork(self, receipt: Receipt) -> Receipt:
        self.receipts.append(replace(receipt, components=set(receipt.components)))
        return self.receipts[-1]

    def release(self, receipt: Receipt, component=None, time=None, rank=None) -> None:
        if not receipt.components:
            raise DoubleFree("twice")
        if component is not None and component not in receipt.components:
            raise DoubleFree("not held")
        self.turn += 1
        self.advance(time)
        self.drop(receipt, set(receipt.components) if component is None else {component}, rank)
        self.prune()

    def drop(self, receipt: Receipt, components: set[int], rank: float | None) -> None:
        before = [self.pinned(c) for c in range(self.num_components)]
        receipt.components = receipt.components - components
        if not receipt.components:
            self.receipts.remove(receipt)
        self.touch_freed(before, rank)

    def touch_freed(self, before: list[set[Node]], rank: float | None) -> None:
        """Count the end of a pin as a use."""
        for c in range(self.num_components):
            for node in before[c] - self.pinned(c):
                self.touch(node, c, False)
                if rank is not None:
                    node.eviction[c].rank = rank

    def advance(self, time: float | None) -> None:
        self.now = self.now if time is None else max(self.now, time)

    # Insertion.

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
        path = self.walk(self.root(namespace), blocks)
        old = sum(matched for _, matched in path)
        taken, duplicates = self.sort_lanes(path, [lane[: len(blocks)] for lane in lanes])
        ends = {node.end: node.state for node, matched in path if matched == len(node.blocks)}
        for length, state in states:
            mine_state = ends.get(length // self.block_size)
            if mine_state is None:
                self.take(self.num_lanes, state, taken)
            elif mine_state != state:
                duplicates[-1].append(state)
        self.turn += 1
        self.advance(time)
        expiry = math.inf if time_to_live is None else time + time_to_live
        fresh = self.fresh()
        if priority is not None:
            fresh.priority, fresh.expiry = priority, expiry
        if rank is not None:
            fresh.rank = rank
        end = self.add_rest(path, self.root(namespace), blocks, lanes, [fresh] * self.num_components)
        for node, _ in path:
            for eviction in node.eviction:
                self.use(eviction)
                self.expire(eviction)
                if priority is not None and (priority, expiry) > (eviction.priority, eviction.expiry):
                    eviction.priority, eviction.expiry = priority, expiry
                if rank is not None:
                    eviction.rank = rank
        for length, state in states:
            node = self.split_path(end, length // self.block_size)
            if node.state is None:
                node.state = state
                is_branch = self.branches_before_next_state(node, end)
                node.eviction[-1] = replace(fresh, weight=self.fresh().weight, is_branch=is_branch)
                self.place_state(node)
        if receipt is not None and blocks:
            self.move(receipt, self.split_path(end, len(blocks)), namespace)
        self.prune()
        return self.inserted(len(blocks), old, taken, duplicates)

    def inserted(self, blocks: int, old: int, taken: list[list[int]], duplicates: list[list[int]]):
        size = self.block_size
        return {
            "num_tokens": blocks * size,
            "num_old_tokens": old * size,
            "taken": taken,
            "duplicates": duplicates,
        }

    def sort_lanes(self, path, lanes):
        """Sort the ids offered for a path and the blocks after it into taken and duplicate ids, by lane."""
        taken: list[list[int]] = [[] for _ in range(self.num_lanes + 1)]
        duplicates: list[list[int]] = [[] for _ in range(self.num_lanes + 1)]
        for lane, ids in enumerate(lanes):
            mine = [block for node, matched in path for block in node.lanes[lane][:matched]]
            for i, offered in enumerate(ids):
                if offered == NULL and (i < len(mine) or lane >= self.full):
                    continue
                if offered <= NULL:
                    raise InvalidBlock(str(offered))
                if i >= len(mine) or mine[i] == NULL:
                    self.take(lane, offered, taken)
                elif mine[i] != offered:
                    duplicates[lane].append(offered)
        return taken, duplicates

    def take(self, lane: int, id: int, taken: list[list[int]]) -> None:
        if id in taken[lane] or id in self.ids(lane):
            raise DoubleFree("held already")
        taken[lane].append(id)

    def add_rest(self, path, top: Node, blocks: list[Block], lanes, eviction: list[EvictionState]) -> Node:
        """Fill the holes of the path and add the blocks that it lacks; return the last node."""
        if path and path[-1][1] < len(path[-1][0].blocks):
            path[-1] = (self.split(*path[-1]), path[-1][1])
        end = path[-1][0] if path else top
        done = 0
        for node, matched in path:
            for lane in range(self.full, self.num_lanes):
                for i in range(matched):
                    node.lanes[lane][i] = node.lanes[lane][i] or lanes[lane][done + i]
            done += matched
        if done == len(blocks):
            return end
        leaf = Node(
            end,
            blocks[done:],
            [list(lane[done : len(blocks)]) for lane in lanes],
            [replace(one) for one in eviction],
            object(),
        )
        end.children[blocks[done]] = leaf
        if len(end.children) > 1:
            self.note_branch(end)
        return leaf

    def place_state(self, node: Node) -> None:
        """Measure a new state from those before it, and mark these."""
        new = node.eviction[-1]
        above = [each for each in node.path()[1:] if each.state is not None]
        if above:
            last = above[0].eviction[-1]
            self.set_kind(last, "has_next", True, has_ended=last.is_reused)
            if last.is_branch and not self.branches_before_next_state(above[0], node.path()[1]):
                self.set_kind(last, "is_branch", False)
        new.after_state = node.end - (above[0].end if above else 0)
        new.after_branch = node.end - max((each.end for each in above if each.eviction[-1].is_branch), default=0)
        if new.is_branch:
            self.pass_states(node)

    def note_branch(self, end: Node) -> None:
        """Mark the last state before a branch at the end of a node, and those before it."""
        node = next((each for each in end.path() if each.state is not None), None)
        if node is not None:
            self.set_kind(node.eviction[-1], "is_branch", True)
            self.pass_states(node)

    def pass_states(self, node: Node) -> None:
        for each in node.path()[1:]:
            if each.state is not None:
                if not each.eviction[-1].is_learned:
                    return
                self.set_kind(each.eviction[-1], "is_passed", True)

    def set_kind(self, state: EvictionState, kind: str, value: bool, has_ended: bool = True) -> None:
        if getattr(state, kind) != value:
            if has_ended:
                self.rates.count_end(state)
            setattr(state, kind, value)
            state.is_reused, state.weight = False, self.rates.weight(state)

    def end_state(self, node: Node, end: int) -> None:
        self.rates.count_end(node.eviction[-1])
        node.eviction[-1].evicted_after = end

    def branches_before_next_state(self, node: Node, end: Node) -> bool:
        """Return True if the inserted path, which ends with `end`, branches after a node and before the next state."""
        path = end.path()
        below = path[: path.index(node)]
        states = [i for i, each in enumerate(below) if each.state is not None]
        return any(len(each.children) > 1 for each in [node, *below[max(states, default=-1) + 1 :]])

    def extend(self, tokens, lanes, receipt: Receipt, time=None):
        blocks = self.blocks_of(tokens, [])
        node = receipt.node
        done = node.end if node else 0
        if not receipt.components:
            raise DoubleFree("twice")
        if len(blocks) < done or any(len(lane) < len(blocks) for lane in lanes):
            raise ShapeError("blocks")
        top = node or self.root(receipt.namespace)
        rest, lanes = blocks[done:], [lane[done : len(blocks)] for lane in lanes]
        path = self.walk(top, rest)
        old = done + sum(matched for _, matched in path)
        taken, duplicates = self.sort_lanes(path, lanes)
        self.advance(time)
        if rest:
            self.turn += 1
            self.run_on(receipt, top, path, rest, lanes)
        self.prune()
        return self.inserted(len(blocks), old, taken, duplicates)

    def run_on(self, receipt: Receipt, top: Node, path, rest: list[Block], lanes) -> None:
        before = [self.pinned(c) for c in range(self.num_components)]
        is_alone = sum(other.node is top for other in self.receipts) == 1
        if receipt.node is None:
            receipt.since = self.turn
        goal = top.end + len(rest)
        can_grow = receipt.node and is_alone and not top.children and top.state is None
        if can_grow and self.policy in BY_INSERTION:
            can_grow = top.eviction[0].made >= receipt.since
        if can_grow and not (self.policy in BY_HITS and top.eviction[0].hits):
            top.blocks += rest
            top.lanes = [mine + more for mine, more in zip(top.lanes, lanes, strict=True)]
            for c in range(self.num_components):
                self.touch(top, c, False)
            end = top
        else:
            eviction = [self.fresh() for _ in range(self.num_components)]
            for new, old in zip(eviction, top.eviction, strict=False):
                new.priority, new.expiry, new.rank = old.priority, old.expiry, old.rank
            end = self.add_rest(path, top, rest, lanes, eviction)
            for node, _ in path:
                for one in node.eviction:
                    self.use(one)
                    self.expire(one)
            end = self.split_path(end, goal)
        windows = [c for c in range(1, len(self.windows) + 1) if c in receipt.components]
        for c in windows:
            for start in (self.window_start(c, goal), self.sink_blocks(c) if self.window_start(c, goal) else 0):
                if not start:
                    continue
                known = set(self.nodes())
                upper = self.split_path(end, start)
                for pinned in before:  # both halves inherit the pins of the whole
                    if upper not in known and pinned & set(upper.children.values()):
                        pinned.add(upper)
        receipt.node = end
        receipt.components = (receipt.components | {0}) - ({self.num_components - 1} if self.states else set())
        self.turn += 1
        self.touch_freed(before, None)
        for c in windows:
            if start := self.window_start(c, goal):
                self.join(self.split_path(end, start), receipt.since)

    def join(self, lower: Node, since: int) -> None:
        """Join a node with its parent if they come from one insertion and the same receipts have used them."""
        upper = lower.parent
        if upper is None or upper.run is not lower.run or upper.state is not None or len(upper.children) != 1:
            return
        if any(receipt.node is upper for receipt in self.receipts):
            return
        for c in range(1, len(self.windows) + 1):
            pins = self.pins(c)
            if pins[upper] != pins[lower] or lower.depth == self.sink_blocks(c):
                return
            if (upper.eviction[c].used >= since) != (lower.eviction[c].used >= since):
                return
        assert upper.parent is not None
        upper.parent.children[upper.blocks[0]] = lower
        lower.parent = upper.parent
        lower.blocks = upper.blocks + lower.blocks
        lower.lanes = [above + below for above, below in zip(upper.lanes, lower.lanes, strict=True)]
        lower.eviction[: 1 + len(self.windows)] = upper.eviction[: 1 + len(self.windows)]
        self.join(lower, since)

    def move(self, receipt: Receipt, end: Node, namespace: object) -> None:
        receipt.namespace = namespace
        if receipt.node is end:
            return
        components = (receipt.components | {0}) - ({self.num_components - 1} if self.states else set())
        self.turn += 1
        self.drop(receipt, set(receipt.components), None)
        self.turn += 1
        self.receipts.remove(self.lock_end(end, components, False, namespace))
        receipt.node, receipt.components, receipt.since = end, components, self.turn
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

    # Eviction.

    def spare(self, node: Node, component: int) -> tuple[int, int]:
        """Return the rank of what a node gives up at once, and the number of ids."""
        count = self.count(node, component)
        if not self.is_window(component) or self.policy in ("fifo", "mru", "filo"):
            return 2, count
        needed = node.end - self.window_start(component, node.end)
        if chunk := self.windows[component - 1][1]:
            needed = max(needed, chunk // self.block_size)
        needed = min(node.end, max(needed, self.min_kept))
        near = needed + 1024 // self.block_size
        if count > near:
            return 0, count - near
        return (1, count - needed) if count > needed else (2, count)

    def worth(self, node: Node, component: int) -> tuple[float, int, float]:
        primary, turn = node.eviction[component].key(self.policy)
        if self.is_window(component) and self.policy == "lru":
            primary = 0.0
        return primary, self.spare(node, component)[0], turn

    def evict(self, component: int, amount: int, time: float | None = None):
        if amount < 0:
            raise ShapeError(str(amount))
        self.advance(time)
        left = amount = min(amount, self.evictable(component))
        out: list[list[int]] = [[] for _ in range(self.num_lanes + 1)]
        while left > 0:
            pinned = self.pinned(component)
            can_go = [
                node
                for node in self.nodes()
                if node not in pinned and self.count(node, component) and not (component == 0 and node.children)
            ]
            for node in can_go:
                self.expire(node.eviction[component])
            sinks = self.sink_blocks(component)
            node = min(can_go, key=lambda node: (*self.worth(node, component), node.depth < sinks, node.depth))
            one = node.eviction[component]
            if self.states and component == self.num_components - 1:
                self.clock = max(self.clock, one.deadline)
            gone = min(left, self.spare(node, component)[1])
            left -= gone
            self.give_up(node, component, gone, out)
            if self.states and component == self.num_components - 1 and one.is_branch and node.parent is not None:
                self.note_branch(node.parent)
            pruned = self.prune()
            left -= pruned if component == 0 else 0
        return amount - left, out

    def evict_path(self, tokens, keep=0, namespace=None, spans=()):
        out: list[list[int]] = [[] for _ in range(self.num_lanes + 1)]
        path = self.walk(self.root(namespace), self.blocks_of(tokens, list(spans)))
        keep, gone = -(-keep // self.block_size), 0
        while path and (node := path[-1][0]).end > keep:
            if path.pop()[1] < len(node.blocks) or node.children or node in self.pinned(0):
                break
            count = min(len(node.blocks), node.end - keep)
            self.give_up(node, 0, count, out)
            gone += count
        self.prune()
        return gone, out

    def revoke(self, tokens, valid=0, receipts=(), namespace=None, spans=()):
        out: list[list[int]] = [[] for _ in range(self.num_lanes + 1)]
        valid //= self.block_size
        path = self.walk(self.root(namespace), self.blocks_of(tokens, list(spans)))
        covering = [node for node, matched in path if node.depth <= valid < node.depth + matched]
        if not covering:
            return 0, out
        (top,) = covering
        upper = self.split(top, valid - top.depth) if valid > top.depth else top.parent
        for receipt in receipts:
            if receipt.node is not None and top in receipt.node.path():
                self.shorten(receipt, upper)
        gone = self.evict_leaves([node for node in self.nodes() if node is top], out)
        self.prune()
        return gone, out

    def shorten(self, receipt: Receipt, end: Node) -> None:
        if end.end > 0:
            self.move(receipt, end, receipt.namespace)
        else:
            self.turn += 1
            self.drop(receipt, set(receipt.components), None)
            receipt.node, receipt.components = None, set(range(self.num_components))
            self.receipts.append(receipt)
        self.prune()

    def evict_namespace(self, namespace):
        out: list[list[int]] = [[] for _ in range(self.num_lanes + 1)]
        return self.evict_leaves(list(self.root(namespace).children.values()), out), out

    def evict_leaves(self, tops: list[Node], out: list[list[int]]) -> int:
        """Evict nodes and all below them, from the leaves up, except for what is pinned."""
        gone = 0
        while True:
            pinned, left = self.pinned(0), [node for node in tops if node.blocks]
            leaves = []
            while left:
                node = left.pop()
                left += node.children.values()
                if not node.children and node not in pinned:
                    leaves.append(node)
            if not leaves:
                return gone
            for node in leaves:
                gone += len(node.blocks)
                self.give_up(node, 0, len(node.blocks), out)

    def prune(self) -> int:
        """Without full lanes, remove empty leaves repeatedly; return the number of blocks removed."""
        gone, pinned = 0, self.pinned(0)
        while not self.full:
            leaves = [node for node in self.nodes() if node not in pinned and not node.children]
            empty = [node for node in leaves if not any(self.count(node, c) for c in range(1, self.num_components))]
            if not empty:
                break
            for node in empty:
                assert node.parent is not None
                del node.parent.children[node.blocks[0]]
                gone += len(node.blocks)
        return gone

    def expire(self, eviction: EvictionState) -> None:
        if eviction.expiry <= self.now:
            eviction.priority, eviction.expiry = 35.0, math.inf

    def give_up(self, node: Node, component: int, amount: int, out: list[list[int]]) -> None:
        if node.state is not None and not self.is_window(component):
            self.end_state(node, node.end)
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
