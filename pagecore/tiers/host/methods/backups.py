"""Methods of a host tier that copy what sequences have published to the host."""

from __future__ import annotations

from collections.abc import Iterable

from pagecore.cache.sequences._sequences import Sequence, as_list
from pagecore.cache.state._state import Held
from pagecore.errors import ShapeError
from pagecore.storage.checks import INT32_MAX, as_tuple, flag, require_int
from pagecore.tiers.host.methods.records import Backup
from pagecore.tiers.host.methods.spilling import SpillMethods
from pagecore.tiers.host.operations import _operations


class BackupMethods(SpillMethods):
    """`HostTier.backup`, `poll` and `drain`."""

    def backup(
        self, sequences: Sequence | Iterable[Sequence], *, max_tokens: int | None = None, is_last: bool = False
    ) -> int:
        """Copy the published whole blocks that the host lacks; return their number, summed over the groups.

        If every layer of the cache keeps a state, the number is that of states.

        A host tier with the policy "priority" or "rank" also takes the priority or rank of each sequence for the blocks
        that it has already, if it is higher, or later. Blocks from the first one on whose priority is below
        `min_priority` are not copied.

        Blocks and the newest checkpoint are copied, and then published in the host's tree: on the host before the call
        returns; on CUDA on a stream of their own, after the work of the last step, and `poll` publishes them. Until
        then the blocks of the device are pinned. If the host is full of pinned blocks, less is copied. A sequence that
        is swapped out has no published blocks.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
        max_tokens : int, optional
            Longest prefix of each sequence to copy.
        is_last : bool
            The sequences are about to be removed: the times to live of their copies begin again.

        Raises
        ------
        InvalidSequence
            A sequence that is not of this cache; nothing was copied.
        PagecoreError
            A copy failed: the host has what it had.
        """
        self._require_open()
        ends = flag("is_last", is_last)
        if not self._transfers.is_ready():
            return 0
        most = INT32_MAX if max_tokens is None else min(require_int("max_tokens", max_tokens, 0, max=None), INT32_MAX)
        with Held(self._parts.state.lock):
            listed = _operations.require_all(self._parts.state, as_list(sequences))
            if not self._transfers.is_captured:  # without the driver's relaxed mode a query ends the capture
                self._end_copies()  # otherwise finished copies that are not yet published would be repeated
            return sum([self._back_up(sequence, most, ends) for sequence in listed])

    def list_changed(
        self, sequences: Sequence | Iterable[Sequence], *, max_tokens: Iterable[int] | None = None
    ) -> list[Sequence]:
        """Return the sequences that have published a block or a checkpoint since their last backup, or had no room.

        `backup` of the others copies only what the host has evicted since. Blocks that `min_priority` excludes do not
        count. Sequences that are swapped out, removed or of another cache are left out. A sequence remembers its
        backups to four tiers of its cache, those that were asked or used last.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
        max_tokens : iterable of int, optional
            For each sequence the longest prefix that counts, as in `backup`.

        Returns
        -------
        list of Sequence
            In the order of `sequences`.

        Raises
        ------
        InvalidSequence
            An object that is not a sequence.
        ShapeError
            `max_tokens` has another length than `sequences`.
        """
        self._require_open()
        listed, limits = as_list(sequences), None
        if max_tokens is not None:
            given = as_tuple("max_tokens", max_tokens, "a number for each sequence")
            limits = [min(require_int("max_tokens", most, 0, max=None), INT32_MAX) for most in given]
            if len(limits) != len(listed):
                raise ShapeError(f"{len(limits)} max_tokens are given for {len(listed)} sequences; give one for each")
        with Held(self._parts.state.lock):
            return _operations.list_changed(self._parts.state, self._index, listed, limits)

    def _back_up(self, sequence: Sequence, most: int, is_last: bool) -> int:
        try:
            one = _operations.back_up(self._parts.state, self._index, sequence, most, self._transfers.backup, is_last)
        except Exception:
            self._counts["failed"] += 1
            raise
        if one is None:
            return 0
        self._counts["backups"] += 1
        copied = self._count_backup(one.pairs)
        if not one.num_receipts:
            self._note_published(one)
        return copied

    def poll(self) -> list[Backup]:
        """Publish the copies that are done, and return the backups that ended since the last call: the latest 1,024."""
        with Held(self._parts.state.lock):
            self._end_copies()
            records = list(self._ended)
            self._ended.clear()
        return records

    def _end_copies(self) -> None:
        """Publish the copies that are done, and keep their records for `poll`."""
        for one, error in self._transfers.poll():
            self._counts["failed"] += error is not None
            ended = Backup.of(one, error) if isinstance(one, _operations.Backup) else None
            if ended is not None:
                self._ended.append(ended)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no copy runs; return False if `timeout` seconds pass first. `poll` then returns what ended."""
        return self._transfers.drain(timeout)
