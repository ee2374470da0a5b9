"""What the users of the demo say: chats that begin alike, and some that go on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.serving.demo.config import DemoConfig
from pagecore.serving.request import Request, Run

__all__ = ["Traffic", "Turn", "chat_turns"]

Ids = NDArray[np.int32]
# Turns of a chat lie this far apart.
TURN_STRIDE = 6


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of a chat, numbered in order of arrival.

    `text` is what the user says; the first turn's begins with the system prompt, and one that goes on has all that was
    said up to the answer of turn `after`, its first sample, before it.
    """

    number: int
    after: int | None
    text: Ids
    max_new_tokens: int
    samples: int

    def request(self, history: Ids | None) -> Request:
        """The turn as a request, with the text before it."""
        prompt = self.text if history is None else np.concatenate([history, self.text])
        return Request(self.number, prompt, self.max_new_tokens, self.samples)


def chat_turns(config: DemoConfig) -> list[Turn]:
    """The demo's traffic: chats that begin alike and end differently, short questions and long documents.

    Every third turn is a short question, of two chats that go on and on; every third a longer one, which one more
    follows; the others are long documents. Every fourth turn asks for two to four parallel samples.
    """
    random = np.random.default_rng((config.seed, 1))
    vocabulary = config.model.vocab_size
    system = random.integers(0, vocabulary, 24, np.int32)
    turns = []
    for number in range(config.num_requests):
        low, high, longest = ((4, 24, 60), (40, 120, 80), (100, 220, 60))[number % 3]
        text = random.integers(0, vocabulary, random.integers(low, high), np.int32)
        new = int(random.integers(8, longest))
        samples = int(random.integers(2, 5)) if number % 4 == 1 else 1
        kind, age = number % 3, number // TURN_STRIDE
        goes_on = (kind == 0 and age > 0) or (kind == 1 and age % 2 == 1)
        text = text if goes_on else np.concatenate([system, text])
        turns.append(Turn(number, number - TURN_STRIDE if goes_on else None, text, new, samples))
    return turns


class Traffic:
    """Turns that wait for the answers that they follow, and the histories that they were asked with.

    Attributes
    ----------
    histories : dict of int to int32 array
        What had been said before each turn that went on, by its number.
    """

    def __init__(self, turns: list[Turn]) -> None:
        self.histories: dict[int, Ids] = {}
        self._turns = list(turns)
        self._answered: dict[int, Ids] = {}

    def next(self) -> Request | None:
        """The first turn in order of arrival that can be asked now; None where all others wait for answers."""
        for place, turn in enumerate(self._turns):
            if turn.after is None or turn.after in self._answered:
                return self._asked(self._turns.pop(place))
        return None

    def answer(self, run: Run) -> None:
        """A run has finished; the chat goes on with its first sample."""
        if run.sample == 0:
            self._answered[run.request.id] = run.tokens

    def _asked(self, turn: Turn) -> Request:
        if turn.after is None:
            return turn.request(None)
        history = self.histories[turn.number] = self._answered[turn.after]
        return turn.request(history)
