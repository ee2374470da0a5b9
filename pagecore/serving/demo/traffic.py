"""Traffic of the demo: chats that share a system prompt, some with several turns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.serving.demo.config import DemoConfig
from pagecore.serving.scheduling.request import Request, Run

__all__ = ["Traffic", "Turn", "chat_turns"]

Ids = NDArray[np.int32]
# Distance, in turns, between two turns of the same chat.
TURN_STRIDE = 6


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of a chat, numbered in order of arrival.

    `text` is the message of the user. In the first turn of a chat it begins with the system prompt. The prompt of a
    follow-up turn is `text` after the history, which ends with the first sample of the answer to turn `after`.
    """

    number: int
    after: int | None
    text: Ids
    max_new_tokens: int
    samples: int

    def request(self, history: Ids | None) -> Request:
        """Return the turn as a request, with `history` before its text."""
        prompt = self.text if history is None else np.concatenate([history, self.text])
        return Request(self.number, prompt, self.max_new_tokens, self.samples)


def chat_turns(config: DemoConfig) -> list[Turn]:
    """Return the turns of the demo, in order of arrival.

    All chats begin with the same system prompt. One third of the turns are short questions, which belong to two long
    chats. One third are longer questions, in chats of two turns. The others are long documents, each in a chat of its
    own. Every fourth turn asks for two to four parallel samples.
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
        is_follow_up = (kind == 0 and age > 0) or (kind == 1 and age % 2 == 1)
        text = text if is_follow_up else np.concatenate([system, text])
        turns.append(Turn(number, number - TURN_STRIDE if is_follow_up else None, text, new, samples))
    return turns


class Traffic:
    """Turns that wait for the answers that they follow, and the histories of those that were asked.

    Attributes
    ----------
    histories : dict of int to int32 array
        Token ids before each follow-up turn, by the number of the turn.
    """

    def __init__(self, turns: list[Turn]) -> None:
        self.histories: dict[int, Ids] = {}
        self._turns = list(turns)
        self._answered: dict[int, Ids] = {}

    def next(self) -> Request | None:
        """Return the first turn that can be asked now; None if all turns left wait for answers."""
        for index, turn in enumerate(self._turns):
            if turn.after is None or turn.after in self._answered:
                return self._asked(self._turns.pop(index))
        return None

    def answer(self, run: Run) -> None:
        """Take the answer of a finished run; chats continue with the first sample."""
        if run.sample == 0:
            self._answered[run.request.id] = run.tokens

    def _asked(self, turn: Turn) -> Request:
        if turn.after is None:
            return turn.request(None)
        history = self.histories[turn.number] = self._answered[turn.after]
        return turn.request(history)
