"""Store of blocks in an object store: S3, GCS, Azure Blob, a folder, or memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import StoreError, UnsupportedOption
from pagecore.storage.checks import require_int
from pagecore.tiers import payload
from pagecore.tiers.remote.listing import ListedEntries, ListingReporter
from pagecore.tiers.remote.store import Batch, Identity, RemoteStore, checked_identity, checked_timeout
from pagecore.tiers.resources import descriptors, start_thread

T = TypeVar("T")
Request = Callable[[Batch, int], Coroutine[Any, Any, bool]]

# Ranges of one object that are requested at the same time.
RANGE_BYTES = 8 << 20
FORMS = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder or memory:///"
SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "file", "memory")


class ObjectStore(ListingReporter, RemoteStore):
    """Blocks in an object store, one object each, through obstore.

    An object is a frame of 24 bytes with length and XXH3_64, then the payload; its path is
    ``<prefix>/<name of the fingerprint>/<key in hexadecimal>``. Objects are created only if they do not exist
    (If-None-Match), found by HEAD and read by ranges of 8 MiB. A payload is copied to the caller's memory after it was
    verified; one that differs from its frame is a miss, and its object is deleted.

    Requests run in one thread with an event loop, so that a cancelled batch ends at once.

    Parameters
    ----------
    url : str
        ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, ``file:///folder`` or ``memory:///``.
    fingerprint : Fingerprint
    concurrency : int
        Requests of loads and lookups at the same time; stores have a quarter of it in addition.
    timeout : float
        Seconds after which a request fails. A `Guard` ends batches earlier.
    list_seconds : float, optional
        Seconds between two listings of the objects of the fingerprint, so that events report what other clients or
        rules of the bucket have deleted. A listing is one request for each 1,000 objects. None: no listings.
    **options
        Options of ``obstore.store.from_url``, such as ``region``, ``endpoint``, ``access_key_id``,
        ``secret_access_key``, ``account_name``, ``client_options``. Credentials that are not given come from the
        environment.

    Raises
    ------
    UnsupportedOption
        The URL does not parse, an option is unknown, an object is not a fingerprint, or obstore is not installed.
    StoreError
        The store cannot be reached, or refuses the credentials.
    DeviceError
        The system has no thread or descriptor left.
    ShapeError
        `concurrency` is not a positive integer, or `timeout` or `list_seconds` is not between 0.001 and 1,000,000
        seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        fingerprint: Identity,
        concurrency: int = 32,
        timeout: float = 10.0,
        list_seconds: float | None = None,
        **options: Any,
    ) -> None:
        count = require_int("concurrency", concurrency)
        self._timeout = checked_timeout(timeout)
        self._pause = None if list_seconds is None else checked_timeout(list_seconds, "list_seconds")
        self._listed = None if list_seconds is None else ListedEntries()
        self._folder = checked_identity(fingerprint).name
        self._objects = opened(url, self._timeout, options)
        self._api = imported()
        name = url.partition("?")[0]
        self._check(name)
        super().__init__(name, fingerprint)
        self._copies = ThreadPoolExecutor(2, thread_name_prefix=f"pagecore {self.name} copies")
        self._requests: dict[Batch, list[asyncio.Task[bool]]] = {}
        self._reads = asyncio.Semaphore(count)
        self._writes = asyncio.Semaphore(max(1, count // 4))
        with ExitStack() as made:
            made.callback(self._completions.close)
            with descriptors(name):
                self._loop = asyncio.new_event_loop()
            made.callback(self._loop.close)
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"pagecore {name}", daemon=True)
            made.callback(self._stop_loop)
            start_thread(self._thread, name, "its requests")
            made.pop_all()
        if self._listed is not None:
            self._run(self._list_again_and_again(self._listed))

    def _check(self, name: str) -> None:
        """Ask for an object that does not exist, so that a wrong address or credential is noticed now."""
        try:
            self._api.get(self._objects, f"{self._folder}/check")
        except FileNotFoundError as error:
            missing = next((each for each in ("NoSuchBucket", "ContainerNotFound") if each in str(error)), None)
            if missing:
                raise StoreError(f"{name}: {missing}; create the bucket or container first") from error
        except Exception as error:
            raise StoreError(
                f"{name} cannot be used: {reason(error)}; check the URL, endpoint, region and credentials"
            ) from error

    # ---- listings ----

    async def _list_again_and_again(self, listed: ListedEntries) -> None:
        while True:
            await asyncio.sleep(self._pause or 0)
            missing = listed.begin()
            try:
                await self._list(missing)
            except Exception:  # an incomplete listing says nothing
                missing.clear()
            listed.end(missing)

    async def _list(self, missing: set[bytes]) -> None:
        """Drop from `missing` the keys of the objects that are there."""
        async for objects in self._api.list(self._objects, prefix=self._folder):
            for each in objects:
                with suppress(ValueError):  # an object that is not an entry
                    missing.discard(bytes.fromhex(each["path"].rpartition("/")[2]))

    # ---- batches ----

    def _start(self, batch: Batch) -> None:
        if self._listed is not None:
            self._listed.expect(key.tobytes() for key in batch.keys)
        self._run(self._carry_out(batch))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def _stop(self, batch: Batch) -> None:
        self._loop.call_soon_threadsafe(self._cancel_requests, batch)

    def _cancel_requests(self, batch: Batch) -> None:
        for request in self._requests.get(batch, ()):
            request.cancel()

    def _release(self) -> None:
        self._completions.wait(None)  # cancelled batches end as soon as their copies do
        self._stop_loop()
        if self._loop.is_closed():
            return
        for listings in asyncio.all_tasks(self._loop):
            listings.cancel()
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(listings)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._copies.shutdown()
        self._loop.close()

    def _stop_loop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _carry_out(self, batch: Batch) -> None:
        one = {"lookup": self._look_up, "load": self._load, "store": self._store, "remove": self._remove}[batch.kind]
        limit = self._writes if batch.kind == "store" else self._reads
        requests = [self._loop.create_task(self._limited(limit, one, batch, index)) for index in range(len(batch.keys))]
        self._requests[batch] = requests
        if batch.is_cancelled:
            self._cancel_requests(batch)
        results = await asyncio.gather(*requests, return_exceptions=True)
        del self._requests[batch]
        for index, result in enumerate(results):
            if isinstance(result, bool):
                batch.ok[index] = result
            elif not isinstance(result, asyncio.CancelledError):
                batch.error = batch.error or reason(result)
        if self._listed is not None and batch.kind != "remove":
            self._listed.note(key.tobytes() for key in batch.keys[batch.ok])
        self._end(batch)

    async def _limited(self, limit: asyncio.Semaphore, request: Request, batch: Batch, index: int) -> bool:
        try:
            async with limit, asyncio.timeout(self._timeout):
                return await request(batch, index)
        except TimeoutError:
            raise StoreError(f"{self.name} did not answer within {self._timeout} s") from None

    # ---- entries ----

    def _path(self, batch: Batch, index: int) -> str:
        return f"{self._folder}/{batch.keys[index].tobytes().hex()}"

    async def _look_up(self, batch: Batch, index: int) -> bool:
        try:
            await self._api.head_async(self._objects, self._path(batch, index))
        except FileNotFoundError:
            return False
        return True

    async def _load(self, batch: Batch, index: int) -> bool:
        path = self._path(batch, index)
        total = payload.FRAME_BYTES + int(batch.pieces[index, 1])
        starts = range(0, total, RANGE_BYTES)
        ranges = [
            self._api.get_range_async(self._objects, path, start=start, length=min(RANGE_BYTES, total - start))
            for start in starts
        ]
        parts = await asyncio.gather(*ranges, return_exceptions=True)
        failure = next((part for part in parts if isinstance(part, BaseException)), None)
        if isinstance(failure, FileNotFoundError):
            return False
        if failure is not None:  # a shorter object lacks all bytes of a range, and a server may fail
            if await self._size(path) in (total, None):
                raise failure
            parts = []
        if await self._copied(lambda: accepted(batch, index, parts)):
            return True
        with suppress(Exception):
            await self._api.delete_async(self._objects, path)
        raise StoreError(f"the object {path} differs from its sum or size and was deleted")

    async def _size(self, path: str) -> int | None:
        """Return the bytes of an object; None if the server does not say."""
        try:
            return int((await self._api.head_async(self._objects, path))["size"])
        except Exception:
            return None

    async def _store(self, batch: Batch, index: int) -> bool:
        path = self._path(batch, index)
        if await self._look_up(batch, index):
            return True
        content = await self._copied(lambda: framed(batch, index))
        try:
            await self._api.put_async(self._objects, path, content, mode="create", use_multipart=False)
        except self._api.exceptions.AlreadyExistsError:
            return True
        return True

    async def _remove(self, batch: Batch, index: int) -> bool:
        with suppress(FileNotFoundError):
            await self._api.delete_async(self._objects, self._path(batch, index))
        return True

    async def _copied(self, copy: Callable[[], T]) -> T:
        """Run a copy in a thread; a cancelled request waits for the end of its copy."""
        copying = self._loop.run_in_executor(self._copies, copy)
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.wait([copying])
            raise


def imported() -> Any:
    """Return the module obstore.

    Raises
    ------
    UnsupportedOption
        It is not installed.
    """
    try:
        import obstore
        import obstore.exceptions
    except ImportError as error:
        raise UnsupportedOption(f"ObjectStore needs obstore: {error}; install pagecore[tiers]") from error
    return obstore


def opened(url: str, timeout: float, options: dict[str, Any]) -> Any:
    """Return the store of obstore that a URL names.

    Raises
    ------
    UnsupportedOption
        The URL does not parse, or an option is unknown.
    """
    imported()
    from obstore.store import from_url

    scheme = url.partition(":")[0] if isinstance(url, str) else repr(url)
    if scheme not in SCHEMES:
        raise UnsupportedOption(f"expected the URL of an object store, got the scheme {scheme!r}; use {FORMS}")
    if scheme == "file" and not url.removeprefix("file:").strip("/"):
        raise UnsupportedOption(f"the URL {url!r} names no folder; use {FORMS}")
    if scheme not in {"file", "memory"}:
        limit = timedelta(seconds=timeout)
        client = {"timeout": limit, "connect_timeout": limit, **options.get("client_options", {})}
        retry = options.get("retry_config", {"max_retries": 2, "retry_timeout": limit})
        options = {**options, "client_options": client, "retry_config": retry}
    try:
        return from_url(url, **options)
    except Exception as error:
        raise UnsupportedOption(
            f"the URL or an option of the object store is invalid: {reason(error)}; use {FORMS}"
        ) from error


def reason(error: BaseException) -> str:
    """Return the first line of an error, which names no source."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def framed(batch: Batch, index: int) -> NDArray[np.uint8]:
    """Return a copy of a payload with its frame before it; the frame is that of the copy."""
    address, nbytes = batch.pieces[index].tolist()
    content = np.empty(payload.FRAME_BYTES + nbytes, np.uint8)
    target = content.ctypes.data + payload.FRAME_BYTES
    payload.copy(target, address, nbytes)
    frame = payload.frames_of(batch.keys[index : index + 1], np.array([[target, nbytes]], np.uint64))
    content[: payload.FRAME_BYTES] = frame.view(np.uint8)
    return content


def accepted(batch: Batch, index: int, parts: list[Any]) -> bool:
    """Verify an object and copy its payload to the piece; return False, with nothing written, if it is not intact."""
    address, nbytes = batch.pieces[index].tolist()
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    content = arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.uint8), *arrays])
    if len(content) != payload.FRAME_BYTES + nbytes:
        return False
    source = content.ctypes.data + payload.FRAME_BYTES
    frame = payload.frames_of(batch.keys[index : index + 1], np.array([[source, nbytes]], np.uint64))
    if content[: payload.FRAME_BYTES].tobytes() != frame.tobytes():
        return False
    payload.copy(address, source, nbytes)
    return True
