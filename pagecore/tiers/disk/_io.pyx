"""The I/O queue of the disk store, and the tables of its slabs."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy
from libcpp cimport bool as cbool
from libcpp.utility cimport move

import os

import numpy as np

from pagecore.errors import ShapeError

from pagecore.native.std cimport shared_ptr, span, unique_ptr, vector
from pagecore.native.translate cimport raise_python_error

ctypedef const uint8_t const_uint8

cdef extern from "pagecore/tiers/disk/io_queue.hpp" namespace "pagecore::tiers" nogil:
    cdef cppclass FileOps:
        pass
    const FileOps& system_file_ops()
    const size_t kUnit
    const size_t kKeyBytes
    cdef cppclass Transfer:
        size_t nbytes
        int error
    cdef cppclass Job:
        vector[Transfer] transfers
        uint64_t ticket
    cdef cppclass NativeIoQueue "pagecore::tiers::IoQueue":
        NativeIoQueue(int64_t, const FileOps&) except +raise_python_error
        void submit(unique_ptr[Job]) except +raise_python_error
        void cancel(uint64_t)
        vector[unique_ptr[Job]] poll() except +raise_python_error
        void put_back(vector[unique_ptr[Job]]&)
        cbool drain(double) except +raise_python_error
        void close()
        void signal()
        int fileno()
        int64_t num_pending() except +raise_python_error
        void check_invariants() except +raise_python_error

cdef extern from "pagecore/tiers/disk/slab_table.hpp" namespace "pagecore::tiers" nogil:
    cdef cppclass ContentKey:
        uint8_t* data()
    cdef cppclass Entry:
        ContentKey key, before
        uint32_t slot
        uint64_t sequence
    cdef cppclass NativeSlabTable "pagecore::tiers::SlabTable":
        NativeSlabTable(int, const FileOps&, span[const_uint8], uint32_t, uint64_t, int64_t, int64_t) \
            except +raise_python_error
        int open() except +raise_python_error
        vector[Entry] used() except +raise_python_error
        Transfer transfer(uint32_t, const ContentKey&, void*, uint64_t, cbool) except +raise_python_error
        void clear(uint32_t)
        int flush()
        void check_invariants() except +raise_python_error
    cdef cppclass Place "pagecore::tiers::StoreJob::Place":
        NativeSlabTable* table
        uint32_t slot
        ContentKey key, before
        uint64_t sequence
    cdef cppclass StoreJob(Job):
        StoreJob(uint64_t, vector[Transfer], vector[Place], vector[shared_ptr[NativeSlabTable]]) \
            except +raise_python_error
    cdef cppclass ErasePlace "pagecore::tiers::EraseJob::Place":
        NativeSlabTable* table
        uint32_t slot
    cdef cppclass EraseJob(Job):
        EraseJob(uint64_t, vector[ErasePlace], vector[shared_ptr[NativeSlabTable]]) except +raise_python_error
    cdef cppclass LoadJob(Job):
        LoadJob(uint64_t, vector[Transfer], vector[shared_ptr[NativeSlabTable]]) except +raise_python_error

UNIT = <int> kUnit
ENTRY_BYTES = <int> sizeof(Entry)


NO_KEY = bytes(<int> kKeyBytes)


cdef int copy_key(ContentKey& target, bytes key) except -1:
    if <size_t> PyBytes_GET_SIZE(key) != kKeyBytes:
        raise ShapeError(f"a key has {len(key)} bytes; content keys have {kKeyBytes}")
    memcpy(target.data(), PyBytes_AS_STRING(key), kKeyBytes)
    return 0


cdef const FileOps* ops_at(uintptr_t address) noexcept:
    return <const FileOps*> address if address else &system_file_ops()


cdef class SlabTable:
    """SlabTable(fd, identity, num_slots, payload_bytes, table, data, file_ops=0)\n--\n\n\
Keys of the slots of one slab, in memory and in the file.

    Every method may be called from any thread; the GIL is released.

    Parameters
    ----------
    fd : int
        Open file; the caller keeps it open until the queue that uses the table is closed.
    identity : bytes
        Digest of the slab; entries that another slab wrote are invalid.
    num_slots : int
    payload_bytes : int
        Bytes of the payload of a slot; slots are whole units of 4,096 bytes.
    table, data : int
        Offsets of the table and of the first slot in the file.
    file_ops : int
        Address of a `FileOps` table (file_ops.hpp), whose functions replace preadv and pwritev; by default none.

    Raises
    ------
    ShapeError, NotEnoughMemory
        Invalid sizes, or no memory for the table.
    """
    cdef shared_ptr[NativeSlabTable] native

    def __cinit__(self, int fd, bytes identity, uint32_t num_slots, uint64_t payload_bytes, int64_t table, int64_t data,
                  uintptr_t file_ops=0):
        cdef span[const_uint8] digest = span[const_uint8](
            <const uint8_t*> PyBytes_AS_STRING(identity), <size_t> PyBytes_GET_SIZE(identity)
        )
        self.native.reset(
            new NativeSlabTable(fd, ops_at(file_ops)[0], digest, num_slots, payload_bytes, table, data)
        )

    def open(self):
        """Read the table; raise OSError if the file cannot be read. Invalid entries are left out."""
        cdef int error
        with nogil:
            error = self.native.get().open()
        if error:
            raise OSError(error, os.strerror(error))

    def used(self):
        """Return the entries, by slot: slots, keys, sequence numbers, and keys of the entries before them.

        Returns
        -------
        tuple of ndarray
            uint32 ``[n]``, uint8 ``[n, 17]``, uint64 ``[n]``, uint8 ``[n, 17]``; zeros where no entry is before one.
        """
        cdef vector[Entry] entries
        cdef size_t i
        cdef uint32_t[::1] slot_view
        cdef uint8_t[:, ::1] key_view, before_view
        cdef uint64_t[::1] sequence_view
        with nogil:
            entries = self.native.get().used()
        cdef Py_ssize_t count = <Py_ssize_t> entries.size()
        slots = np.empty(count, np.uint32)
        keys = np.empty((count, kKeyBytes), np.uint8)
        sequences = np.empty(count, np.uint64)
        before = np.empty((count, kKeyBytes), np.uint8)
        slot_view, key_view, sequence_view, before_view = slots, keys, sequences, before
        for i in range(entries.size()):
            slot_view[i] = entries[i].slot
            sequence_view[i] = entries[i].sequence
            memcpy(&key_view[i, 0], entries[i].key.data(), kKeyBytes)
            memcpy(&before_view[i, 0], entries[i].before.data(), kKeyBytes)
        return slots, keys, sequences, before

    def clear(self, uint32_t slot):
        """Forget the key of a slot, which the caller took from `used` or stored; the file may keep it until `flush`."""
        with nogil:
            self.native.get().clear(slot)

    def flush(self):
        """Let the file forget what the table has; return 0 or the first errno. The file must be open."""
        cdef int error
        with nogil:
            error = self.native.get().flush()
        return error

    def check_invariants(self):
        """Raise PagecoreError if an entry is neither zeros nor valid."""
        with nogil:
            self.native.get().check_invariants()


cdef class _Batch:
    """Transfers that are being collected for one job."""
    cdef vector[Transfer] transfers
    cdef vector[Place] places
    cdef vector[shared_ptr[NativeSlabTable]] tables

    cdef int fill(self, list operations, bint is_load, uint64_t sequence) except -1:
        cdef SlabTable table
        cdef Place place
        cdef bytes key
        cdef uint32_t slot
        cdef uintptr_t address
        cdef uint64_t nbytes
        cdef Transfer made
        seen = set()
        for table, slot, key, address, nbytes in operations:
            copy_key(place.key, key)
            place.table = table.native.get()
            place.slot = slot
            place.sequence = sequence
            sequence += 1
            with nogil:
                made = place.table.transfer(slot, place.key, <void*> address, nbytes, is_load)
            self.transfers.push_back(made)
            self.places.push_back(place)
            if table not in seen:
                seen.add(table)
                self.tables.push_back(table.native)
        return 0


cdef class IoQueue:
    """IoQueue(threads=8, file_ops=0)\n--\n\n\
Native threads that load and store payloads; loads go first.

    Every method may be called from any thread. In a child of `os.fork` a submission is refused, and the other methods
    do nothing.

    Parameters
    ----------
    threads : int
        Requests that the disk sees at once.
    file_ops : int
        Address of a `FileOps` table (file_ops.hpp), whose functions replace preadv and pwritev; by default none.

    Attributes
    ----------
    file_ops : int

    Raises
    ------
    ShapeError
        A number of threads outside 1 to 256.
    DeviceError
        The system has no thread or descriptor left.
    """
    cdef unique_ptr[NativeIoQueue] native
    cdef readonly uintptr_t file_ops

    def __cinit__(self, int64_t threads=8, uintptr_t file_ops=0):
        self.file_ops = file_ops
        self.native.reset(new NativeIoQueue(threads, ops_at(file_ops)[0]))

    def __dealloc__(self):
        cdef NativeIoQueue* owned = self.native.release()
        with nogil:
            del owned

    def submit_load(self, uint64_t ticket, list operations):
        """Read payloads and verify their sums.

        Parameters
        ----------
        ticket : int
            Number of the batch, which `poll` returns.
        operations : list of (SlabTable, slot, key, address, nbytes)
            The key is bytes; the memory belongs to the queue until the batch ends. The list is emptied once the queue
            has the batch, so that a caller knows it after an interrupt, too.

        Raises
        ------
        ShapeError
            A payload of another size than the slab's, or an address that is not a multiple of 4,096.
        UnsupportedOption
            The queue is closed, or this is a fork of the process that made it.
        """
        cdef _Batch batch = _Batch.__new__(_Batch)
        batch.fill(operations, True, 0)
        cdef unique_ptr[Job] job
        job.reset(<Job*> new LoadJob(ticket, batch.transfers, batch.tables))
        with nogil:
            self.native.get().submit(move(job))
        operations.clear()

    def submit_store(self, uint64_t ticket, list operations, uint64_t sequence, list before):
        """Write payloads, and afterwards their entries; see `submit_load`.

        Parameters
        ----------
        ticket, operations
            As for `submit_load`.
        sequence : int
            Number of the first entry.
        before : list of bytes or None
            Key of the entry before each one in its prefix.
        """
        cdef _Batch batch = _Batch.__new__(_Batch)
        cdef size_t i
        batch.fill(operations, False, sequence)
        for i in range(batch.places.size()):
            copy_key(batch.places[i].before, before[i] or NO_KEY)
        cdef unique_ptr[Job] job
        job.reset(<Job*> new StoreJob(ticket, batch.transfers, batch.places, batch.tables))
        with nogil:
            self.native.get().submit(move(job))
        operations.clear()

    def submit_erase(self, uint64_t ticket, list places):
        """Forget slots, in the file too; each is listed once.

        Parameters
        ----------
        ticket : int
        places : list of (SlabTable, slot)
            It is emptied as `operations` of `submit_load`.

        Raises
        ------
        UnsupportedOption
            As `submit_load`.
        """
        cdef vector[ErasePlace] erased
        cdef vector[shared_ptr[NativeSlabTable]] tables
        cdef ErasePlace place
        cdef SlabTable table
        cdef uint32_t slot
        for table, slot in places:
            place.table = table.native.get()
            place.slot = slot
            erased.push_back(place)
            tables.push_back(table.native)
        cdef unique_ptr[Job] job
        job.reset(<Job*> new EraseJob(ticket, erased, tables))
        with nogil:
            self.native.get().submit(move(job))
        places.clear()

    def poll(self, list found=None):
        """Return ``(ticket, errors)`` of the batches that ended: 0 or an errno for each payload or erased slot.

        ECANCELED: the transfer had not started when the batch was cancelled. EBADMSG: the sum of a load differs.

        Parameters
        ----------
        found : list, optional
            The batches are appended to it, and it is returned. After a MemoryError it has some of them, and the next
            call appends the others.
        """
        cdef vector[unique_ptr[Job]] ended
        cdef size_t i, j
        cdef list out = [] if found is None else found  # before the queue gives its batches away
        with nogil:
            ended = self.native.get().poll()
        try:
            for i in range(ended.size()):
                errors = [ended[i].get().transfers[j].error for j in range(ended[i].get().transfers.size())]
                out.append((ended[i].get().ticket, errors))
                if found is not None:
                    ended[i].reset()
        except BaseException:
            self.native.get().put_back(ended)  # the next call returns them
            raise
        return out

    def cancel(self, uint64_t ticket):
        """End the transfers of a batch that have not started; `poll` still returns the batch."""
        with nogil:
            self.native.get().cancel(ticket)

    def drain(self, timeout=None):
        """Wait until nothing is pending; return False if `timeout` seconds pass first."""
        cdef double seconds = -1.0 if timeout is None else max(0.0, float(timeout))
        cdef cbool done
        with nogil:
            done = self.native.get().drain(seconds)
        return done

    def close(self):
        """Cancel everything, wait for running transfers and end the threads; a second call does nothing."""
        with nogil:
            self.native.get().close()

    def signal(self):
        """Make the eventfd readable until the next `poll`."""
        self.native.get().signal()

    def fileno(self):
        """Return the eventfd, which is readable after a batch ended."""
        return self.native.get().fileno()

    @property
    def num_pending(self):
        """Batches that have not ended."""
        return self.native.get().num_pending()

    def check_invariants(self):
        """Raise PagecoreError if the lists of the queue are inconsistent."""
        with nogil:
            self.native.get().check_invariants()
