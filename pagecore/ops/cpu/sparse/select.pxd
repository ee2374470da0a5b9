# Declarations of select.hpp, for _cpu.pyx and the modules that fill the arguments.
from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool as cbool

from pagecore.native.translate cimport raise_python_error
from pagecore.ops.args cimport Cache, Indices, Table, TokenArray


cdef extern from "pagecore/ops/cpu/sparse/select.hpp" namespace "pagecore::cpu" nogil:
    cdef cppclass ScoreArgs:
        TokenArray query
        Cache low
        Cache high
        Table table
        const int32_t* channels
        cbool mean
        float* scores
        int64_t width

    cdef cppclass ScoreBatch:
        Indices seq_lens
        Indices rows
        Indices cu_query_lens
        int64_t block_size
        cbool causal

    cdef cppclass SelectArgs:
        const float* scores
        int64_t num_rows
        int64_t width
        Indices lens
        int64_t rows_per_length
        int64_t budget
        int64_t sinks
        int64_t recent
        int64_t threshold
        int32_t* positions
        int32_t* counts
        int64_t capacity

    cdef cppclass SummaryArgs:
        TokenArray key
        Indices slots
        int64_t num_blocks
        int64_t block_size
        Cache low
        Cache high
        Cache label
        const int32_t* channels

    void run_score "pagecore::cpu::score"(
        const ScoreArgs& args, const ScoreBatch& batch, int64_t num_threads) except +raise_python_error
    void run_select "pagecore::cpu::select"(const SelectArgs& args, int64_t num_threads) except +raise_python_error
    void run_summarise "pagecore::cpu::summarise"(
        const SummaryArgs& args, int64_t num_threads) except +raise_python_error
