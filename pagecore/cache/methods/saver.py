"""The methods of a paged cache that give the pages of its memory back to the system, and take fresh ones later."""

from __future__ import annotations

from collections.abc import Iterable

from pagecore.cache import lifecycle
from pagecore.cache.memory.saver import MemorySaver
from pagecore.cache.parts import CacheParts, PartsOwner
from pagecore.cache.prefix._prefix import unused_states
from pagecore.cache.state._state import Held
from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import shown

TAGS = ("kv",)


class SaverMethods(PartsOwner):
    """`PagedKVCache.release_memory` and `resume_memory`."""

    def release_memory(self, tags: Iterable[str] = TAGS) -> int:
        """Give the pages of the cache's memory back to the system or device; addresses and views stay valid.

        On CUDA the call waits for all work of the device. Captured graphs stay valid, and may run after the memory is
        resumed.

        The content is lost: the prefix cache is cleared first. A host tier keeps its copies, and `Tiers` that write
        "on_evict" first move all cached prefixes there; sequences find them again after `resume_memory`. Until then,
        steps, promotions and `swap_in` are refused; sequences may be added and removed, and those that are swapped out
        keep their blocks in their spaces.

        Parameters
        ----------
        tags : iterable of str
            Kinds of memory; "kv" is the only one.

        Returns
        -------
        int
            Bytes of the memory that was released.

        Raises
        ------
        UnsupportedOption
            A cache without `memory_saver`, another tag, an open export (`pagecore.tiers.handover`), or sequences or
            transfers that hold blocks or states; remove them or swap them out. Nothing was changed.
        DeviceError
            CUDA cannot wait for the device, as while a stream is being captured into a graph. The memory counts as
            released: call again after the capture, or call `resume_memory`.

        Notes
        -----
        After SGLang's ``release_memory_occupation``, by which a trainer takes the memory of an engine between rollouts.
        """
        parts, saver = self._parts, _saver_of(self._parts)
        _check_tags(tags)
        with Held(parts.state.lock):
            observer = None if parts.prefix is None else parts.state.observer
            if observer is not None:
                observer.settling()
            _refuse_held(parts)
            if observer is not None:
                observer.releasing()
            lifecycle.clear(parts.state)
            saver.release()
        return saver.nbytes

    def resume_memory(self, tags: Iterable[str] = TAGS) -> None:
        """Let the cache be used again after `release_memory`, with zeros in all blocks; otherwise do nothing.

        Raises
        ------
        UnsupportedOption
            A cache without `memory_saver`, or another tag.
        NotEnoughMemory
            The device has less memory than the cache had; the memory stays released.
        """
        saver = _saver_of(self._parts)
        _check_tags(tags)
        with Held(self._parts.state.lock):
            saver.resume()


def _saver_of(parts: CacheParts) -> MemorySaver:
    if parts.saver is None:
        raise UnsupportedOption("the cache was made without memory_saver; pass memory_saver=True")
    assert isinstance(parts.saver, MemorySaver)
    return parts.saver


def _check_tags(tags: Iterable[str]) -> None:
    try:
        listed = [tags] if isinstance(tags, str) else list(tags)
    except TypeError:
        listed = []
    if not listed or not all(isinstance(tag, str) and tag in TAGS for tag in listed):
        raise UnsupportedOption(f"tags are {shown(listed or tags)}; a cache has the tag 'kv' alone")


def _refuse_held(parts: CacheParts) -> None:
    """Raise UnsupportedOption if anything but the prefix cache holds blocks or states."""
    for export, address in list(parts.exports.items())[:1]:
        raise UnsupportedOption(
            f"export {export.hex()} at {address} is open, and its readers read the memory of the cache; wait with "
            "drain() of its transport, or end it with withdraw(manifest.export), before release_memory"
        )
    available = lifecycle.available(parts.state)
    held = sum(pool.num_blocks - 1 - left for pool, left in zip(parts.block_pools, available, strict=True))
    states = parts.state.states
    held_states = 0
    if states is not None:
        cached = 0 if parts.prefix is None else unused_states(parts.prefix)
        held_states = states.slots.num_used - cached
        held_states += states.checkpoints.num_used if states.num_checkpoints else 0
    if held or held_states:
        raise UnsupportedOption(
            f"sequences, pins or transfers hold {held} blocks and {held_states} states; remove the sequences, or swap "
            "them out, and release the pins, before release_memory"
        )
