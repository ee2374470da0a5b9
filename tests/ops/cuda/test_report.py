"""The report: usage from the compiler's log, faults, and output."""

from __future__ import annotations

import itertools
import json

import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.dtypes.formats import FORMATS
from pagecore.ops.cuda import report
from pagecore.ops.cuda.attention._attention import attention_kernel, launch_shape
from pagecore.ops.cuda.compilation import usage
from pagecore.ops.cuda.compilation.compiler import ARCHITECTURES
from pagecore.ops.cuda.compilation.manifest import Instance, instance, instances
from pagecore.ops.cuda.compilation.usage import Failure, Usage, measure, must_not_spill, read_usage
from pagecore.ops.cuda.report import main, paths, paths_table
from tests.arrays.fake_runtime import FakeRuntime

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1a' for 'sm_90a'
ptxas info    : Function properties for _Z1a
ptxas         .     1840 bytes stack frame, 4384 bytes spill stores, 4024 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1840 bytes cumulative stack size, 512 bytes smem, 368 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1b' for 'sm_90a'
ptxas info    : Function properties for _Z1b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 34 registers, used 1 barriers
"""


def test_the_usage_of_a_kernel_is_read_from_the_log():
    assert read_usage(LOG, "_Z1a", "a", "sm_90a") == Usage("a", "sm_90a", 255, 1840, 4384, 4024, 512)
    plain = read_usage(LOG, "_Z1b", "b", "sm_90a")
    assert plain == Usage("b", "sm_90a", 34, 0, 0, 0, 0)
    assert not plain.spills


@pytest.mark.parametrize(
    "log", ["", LOG.replace("Used 34 registers", ""), LOG.replace("spill loads\nptxas info    : Used 34", "")]
)
def test_a_log_without_the_usage_is_a_failure(log):
    found = read_usage(log, "_Z1b", "b", "sm_90a")
    assert isinstance(found, Failure)
    assert "says nothing of _Z1b" in found.message


@pytest.mark.parametrize(
    ("architecture", "registers", "threads", "shared_bytes", "blocks"),
    [
        ("sm_90a", 32, 32, 0, 32),  # blocks
        ("sm_90a", 32, 1024, 0, 2),  # threads
        ("sm_86", 32, 96, 0, 16),
        ("sm_90a", 128, 128, 64 * 1024, 3),  # shared memory
        ("sm_120", 128, 128, 99 * 1024, 1),
        ("sm_90a", 168, 128, 1024, 3),  # registers
        ("sm_90a", 169, 128, 1024, 2),
        ("sm_90a", 176, 128, 1024, 2),
    ],
)
def test_resident_blocks_are_limited_by_the_scarcest_resource(architecture, registers, threads, shared_bytes, blocks):
    found = Usage("a", architecture, registers, 0, 0, 0, 0)
    assert usage.resident_blocks(found, threads, shared_bytes) == blocks


def test_every_architecture_has_the_sizes_of_its_multiprocessor():
    assert {usage.resident_blocks(Usage("a", name, 255, 0, 0, 0, 0), 128, 0) for name in ARCHITECTURES} == {2}


ENTRIES = ["decode", "decode_stored", "decode_sealed", "prefill", "prefill_stored", "prefill_sealed"]
ENTRIES += ["general", "general_stored", "general_sealed"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_attention_kernels_have_a_launch_shape(entry):
    shapes = [launch_shape(each.entry, each.arguments) for each in instances() if each.entry == entry]
    assert shapes
    for threads, shared_bytes in shapes:
        assert threads % 32 == 0
        assert 1024 <= shared_bytes <= 99 * 1024
    assert launch_shape("write_kv", ("float", "float")) is None


@pytest.mark.parametrize(
    ("source", "strict"), [("decode.cu", True), ("prefill_mma.cu", True), ("write.cu", False), ("undecode.cu", False)]
)
def test_decode_and_prefill_must_not_spill(source, strict):
    assert must_not_spill(Instance("a<1>", "a", source, ("1",))) == strict
    assert not must_not_spill(Instance("a<WholeTile>", "a", source, ("WholeTile",)))


# Dims of a call, and of the smallest instance that serves them.
@pytest.mark.parametrize(
    ("dims", "served"),
    [
        ((8, 8), "64"),
        ((64, 64), "64"),
        ((72, 8), "96"),
        ((80, 80), "96"),
        ((112, 112), "128"),
        ((64, 128), "128"),
        ((160, 160), "192"),
        ((192, 128), "192,128"),
        ((136, 64), "192,128"),
        ((128, 136), "192"),
        ((200, 64), "256"),
        ((256, 256), "256"),
    ],
)
def test_the_matrix_kernels_serve_every_multiple_of_8_up_to_256(dims, served):
    key, _, value = served.partition(",")
    for dtype, element in (("float16", "pc_half"), ("bfloat16", "pc_bfloat16")):
        for decode, full in itertools.product((False, True), repeat=2):
            name = attention_kernel(*dims, dtype, dtype, dtype, decode=decode, full=full)
            entry, kind = "decode" if decode else "prefill", "Full" if full else "Plain"
            assert name == f"{entry}<{element},{key},{kind}{',' + value if value else ''}>"
            assert instance(name).entry == entry


@pytest.mark.parametrize(
    ("dims", "dtypes", "aligned", "served"),
    [
        ((80, 80), ("float32",) * 3, True, "128"),
        ((80, 80), ("bfloat16",) * 3, False, "128"),
        ((64, 64), ("bfloat16", "float16", "float16"), True, "64"),
        ((64, 64), ("float16", "float16", "bfloat16"), True, "64"),
        ((100, 100), ("float16",) * 3, True, "128"),
        ((64, 4), ("float16",) * 3, True, "64"),
        ((264, 8), ("float16",) * 3, True, "512"),
    ],
)
def test_the_general_kernel_serves_the_others(dims, dtypes, aligned, served):
    for decode in (False, True):
        name = attention_kernel(*dims, *dtypes, aligned=aligned, decode=decode, full=True)
        assert name == f"general<{served},Full>"


FORMAT_NUMBERS = {name: number for number, name in enumerate(FORMATS, 1)}


@pytest.mark.parametrize(
    ("name", "dims", "query", "served"),
    [
        ("float8_e4m3fn", (128, 128), "bfloat16", "decode_stored<pc_half,8,128,Plain>"),
        ("int8_token", (96, 64), "float16", "decode_stored<pc_half,8,128,Plain>"),
        ("int4_token", (256, 256), "bfloat16", "decode_stored<pc_half,4,256,Plain>"),
        ("nvfp4", (64, 64), "bfloat16", "decode_stored<pc_half,4,64,Plain>"),
        ("mxfp8", (128, 128), "bfloat16", "decode_stored<pc_bfloat16,8,128,Plain>"),
        ("fp4_block16", (128, 64), "bfloat16", "decode_stored<pc_bfloat16,4,128,Plain>"),
        # Rows of scales with part of a word; dims and queries without an instance.
        ("nvfp4", (96, 96), "bfloat16", "general_stored<128,Plain>"),
        ("mxfp8", (64, 64), "bfloat16", "general_stored<64,Plain>"),
        ("mxfp8", (256, 256), "bfloat16", "general_stored<256,Plain>"),
        ("fp4_block16", (256, 64), "bfloat16", "general_stored<256,Plain>"),
        ("fp4_block16", (128, 128), "float16", "general_stored<128,Plain>"),
        ("int8_token", (128, 128), "float32", "general_stored<128,Plain>"),
        ("int8_token", (72, 72), "float16", "general_stored<128,Plain>"),
        ("int8_token", (288, 288), "float16", "general_stored<512,Plain>"),
    ],
)
def test_quantised_caches_have_kernels(name, dims, query, served):
    number = FORMAT_NUMBERS[name]
    formats = {"key_format": number, "value_format": number}
    assert attention_kernel(*dims, query, query, query, decode=True, **formats) == served
    assert instance(served)
    mixed = {"key_format": number, "value_format": 0}
    assert attention_kernel(*dims, query, query, query, decode=True, **mixed).startswith("general_stored<")


@pytest.mark.parametrize(
    ("dims", "query", "more", "served"),
    [
        ((128, 128), "bfloat16", {}, "decode_sealed<pc_bfloat16,128,Plain>"),
        ((64, 64), "float16", {"full": True}, "decode_sealed<pc_half,64,Full>"),
        ((80, 96), "bfloat16", {}, "decode_sealed<pc_bfloat16,96,Plain>"),
        ((64, 128), "bfloat16", {}, "decode_sealed<pc_bfloat16,128,Plain>"),
        ((192, 128), "float16", {"full": True}, "decode_sealed<pc_half,192,Full,128>"),
        ((256, 256), "bfloat16", {}, "decode_sealed<pc_bfloat16,256,Plain>"),
        ((64, 64), "bfloat16", {"selected": True}, "decode_sealed<pc_bfloat16,64,Selected>"),
        ((192, 128), "float16", {"selected": True}, "decode_sealed<pc_half,256,Selected>"),
        ((128, 128), "bfloat16", {"decode": False}, "prefill_sealed<pc_bfloat16,128,Plain>"),
        ((64, 64), "float16", {"decode": False, "full": True}, "prefill_sealed<pc_half,64,Full>"),
        ((80, 96), "bfloat16", {"decode": False}, "prefill_sealed<pc_bfloat16,96,Plain>"),
        ((192, 128), "float16", {"decode": False, "full": True}, "prefill_sealed<pc_half,192,Full,128>"),
        ((256, 256), "bfloat16", {"decode": False}, "prefill_sealed<pc_bfloat16,256,Plain>"),
        # Planes that matrix instructions do not read; dims, dtypes, rows and selections.
        ((64, 64), "bfloat16", {"decode": False, "sealed_matrix": False}, "general_sealed<64,Plain>"),
        ((64, 64), "bfloat16", {"decode": False, "selected": True}, "general_sealed<64,SelectedFull>"),
        ((128, 128), "bfloat16", {"sealed_matrix": False}, "general_sealed<128,Plain>"),
        ((20, 64), "bfloat16", {}, "general_sealed<64,Plain>"),
        ((264, 64), "bfloat16", {}, "general_sealed<512,Plain>"),
        ((64, 64), "float32", {"full": True}, "general_sealed<64,Full>"),
        ((64, 64), "bfloat16", {"aligned": False}, "general_sealed<64,Plain>"),
        ((64, 64), "bfloat16", {"selected": True, "full": True}, "general_sealed<64,SelectedFull>"),
    ],
)
def test_sealed_blocks_have_kernels(dims, query, more, served):
    call = {"sealed": True, "sealed_matrix": True, "decode": True} | more
    assert attention_kernel(*dims, query, query, query, **call) == served
    assert instance(served)


@pytest.mark.parametrize(
    ("names", "dims", "query", "served"),
    [
        ("float8_e4m3fn", (128, 128), "bfloat16", "prefill_stored<pc_bfloat16,8,128,Plain>"),
        ("float8_e5m2", (96, 64), "float16", "prefill_stored<pc_half,8,128,Plain>"),
        ("int8_token", (96, 64), "float16", "prefill_stored<pc_half,8,128,Plain>"),
        ("int4_token", (256, 256), "bfloat16", "prefill_stored<pc_bfloat16,4,256,Plain>"),
        ("nvfp4", (64, 64), "float16", "prefill_stored<pc_half,4,64,Plain>"),
        ("mxfp8", (256, 256), "bfloat16", "prefill_stored<pc_bfloat16,8,256,Plain>"),
        ("fp4_block16", (192, 128), "bfloat16", "prefill_stored<pc_bfloat16,4,256,Plain>"),
        (("int8_token", "mxfp8"), (128, 128), "bfloat16", "prefill_stored<pc_bfloat16,8,128,Plain>"),
        (("int4_token", "nvfp4"), (128, 128), "float16", "prefill_stored<pc_half,4,128,Plain>"),
        # Rows of scales with part of a word.
        ("nvfp4", (96, 96), "bfloat16", "prefill_stored<pc_bfloat16,4,128,Plain>"),
        ("mxfp8", (64, 64), "bfloat16", "prefill_stored<pc_bfloat16,8,64,Plain>"),
        # UE8M0 scales and halves; codes of 8 and of 4 bits; rows with part of 16 bytes; dims; dtypes.
        ("int8_token", (72, 72), "bfloat16", "general_stored<128,Plain>"),
        ("mxfp8", (128, 128), "float16", "general_stored<128,Plain>"),
        (("int8_token", "int4_token"), (128, 128), "float16", "general_stored<128,Plain>"),
        (("int8_token", None), (128, 128), "bfloat16", "general_stored<128,Plain>"),
        ("int8_token", (288, 288), "float16", "general_stored<512,Plain>"),
        ("int8_token", (128, 128), "float32", "general_stored<128,Plain>"),
    ],
)
def test_prompts_over_quantised_caches_have_kernels(names, dims, query, served):
    key, value = (names, names) if isinstance(names, str) else names
    formats = {"key_format": FORMAT_NUMBERS[key], "value_format": FORMAT_NUMBERS.get(value, 0)}
    assert attention_kernel(*dims, query, query, query, **formats) == served
    assert attention_kernel(*dims, query, query, query, aligned=False, **formats).startswith("general_stored<")
    assert attention_kernel(*dims, query, query, query, aligned_scales=False, **formats) == served
    full = served.replace("Plain", "Full")
    assert attention_kernel(*dims, query, query, query, full=True, **formats) == full
    assert instance(served)
    assert instance(full)


def test_paths_are_reported_with_the_kernels(measured, monkeypatch, capsys):
    lines = [line.split("  ") for line in paths_table().splitlines()]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert cells["head dims"] == ["float16", "bfloat16", "16-bit, rows not at 16 bytes", "mixed dtypes", "float32"]
    assert cells["80"] == ["decode, prefill 96", "decode, prefill 96", "general 128", "general 128", "general 128"]
    assert cells["192, values 128"][:3] == ["decode, prefill 192/128"] * 2 + ["general 256"]
    monkeypatch.setattr(report, "instances", lambda: (Instance("prefill<T>", "prefill", "a.cu", ("T", "64", "Plain")),))
    assert main(["--arch", "sm_80"]) == 0
    assert paths_table() in capsys.readouterr().out


def test_real_figures_come_from_the_compiler(nvrtc, toys):
    (found,) = measure([instance("add<float,1>")], ["sm_90a"])
    assert isinstance(found, Usage)
    assert 4 <= found.registers <= 32
    assert (found.stack_bytes, found.spills, found.static_shared_bytes) == (0, False, 0)


@pytest.mark.slow
def test_a_spill_is_reported(nvrtc, toys):
    (found,) = measure([Instance("spill<400>", "spill", "decode_toy.cu", ("400",))], ["sm_80"])
    assert isinstance(found, Usage)
    assert found.registers >= 254
    assert found.spills
    assert found.stack_bytes > 0


@pytest.fixture
def measured(toys, monkeypatch):
    """Replace the compiler by given figures."""
    figures = {}

    def measure(chosen, architectures, num_processes):
        for architecture in architectures:
            for each in chosen:
                yield figures.get((each.name, architecture), Usage(each.name, architecture, 40, 0, 0, 0, 0))

    monkeypatch.setattr(report, "measure", measure)
    monkeypatch.setattr(report, "compiler_version", lambda: "13.5")
    return figures


def test_the_table_has_one_row_for_each_kernel_and_one_column_for_each_architecture(measured, capsys):
    measured["add<float,1>", "sm_90a"] = Usage("add<float,1>", "sm_90a", 255, 16, 8, 4, 512)
    assert main(["--arch", "sm_80,sm_90a", "--jobs", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "shared", "sm_80", "sm_90a"]
    assert lines[1].split() == ["add<float,1>", "-", "40", "255", "k16", "s8+4", "m512"]
    assert [line.split()[0] for line in lines[1:6]] == [each.name for each in instances()]
    assert len({len(line) for line in lines[:6]}) == 1
    assert "NVRTC 13.5: 10 programs in" in lines[-1]
    assert "3 processes" in lines[-1]


def test_a_spill_is_a_fault_only_in_decode_and_prefill(measured, capsys):
    for name in ("add<float,1>", "spill<8>"):
        measured[name, "sm_80"] = Usage(name, "sm_80", 255, 16, 8, 4, 0)
    assert main(["--arch", "sm_80"]) == 1
    assert capsys.readouterr().err == "spill<8> for sm_80 spills 8 bytes out and 4 in; decode and prefill must not\n"
    assert main(["--arch", "sm_80", "--kernel", "add"]) == 0


def test_a_stack_in_decode_is_a_fault_even_without_a_spill(measured, capsys):
    measured["spill<8>", "sm_80"] = Usage("spill<8>", "sm_80", 200, 16, 0, 0, 0)
    assert main(["--arch", "sm_80"]) == 1
    errors = capsys.readouterr().err
    assert errors == "spill<8> for sm_80 has a stack of 16 bytes; decode and prefill must have none\n"


def test_a_failed_kernel_is_a_fault_with_its_log(measured, capsys):
    for name in ("add<float,1>", "add<float,2>"):
        measured[name, "sm_80"] = Failure(name, "sm_80", "refused:\ntoy.cu(3): error")
    assert main(["--arch", "sm_80"]) == 1
    output = capsys.readouterr()
    assert "failed" in output.out
    assert output.err == "add<float,1> for sm_80: refused:\ntoy.cu(3): error\nadd<float,2> for sm_80: fails as well\n"


def test_all_figures_go_to_json(measured, capsys, tmp_path):
    assert main(["--arch", "sm_80", "--kernel", "pc_half,2", "--json", str(tmp_path / "usage.json")]) == 0
    written = json.loads((tmp_path / "usage.json").read_text())
    assert written["nvrtc"] == "13.5"
    assert written["kernels"] == [
        {
            "kernel": "add<pc_half,2>",
            "architecture": "sm_80",
            "registers": 40,
            "stack_bytes": 0,
            "spill_store_bytes": 0,
            "spill_load_bytes": 0,
            "static_shared_bytes": 0,
            "threads": None,
            "dynamic_shared_bytes": None,
        }
    ]
    assert written["paths"] == paths()
    capsys.readouterr()
    assert main(["--arch", "sm_80", "--kernel", "pc_half,2", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"] == written["kernels"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "nothing"], "no kernel of the manifest has 'nothing' in its name"),
        (["--arch", "sm_75"], "the kernels need sm_80"),
        (["--arch", "90a"], "it is written sm_80"),
    ],
)
def test_invalid_arguments_are_refused(measured, capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_architecture_can_be_that_of_the_device(measured, capsys):
    with use_runtime(FakeRuntime()):
        assert main(["--arch", "device"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["kernel", "shared", "sm_90a"]


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_the_number_of_processes_must_be_positive(measured, capsys, jobs):
    with pytest.raises(SystemExit, match="2"):
        main(["--jobs", jobs])


def test_results_of_several_processes_keep_the_order_of_the_instances(toys, monkeypatch):
    """A stub pool that runs in this process records the tasks."""
    made = []

    class Pool:
        def __init__(self, num_processes, context, initializer, initargs):
            made.append((num_processes, context.get_start_method(), initargs))
            initializer(*initargs)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        map = staticmethod(map)

    monkeypatch.setattr(usage, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(usage, "_measure_one", lambda task: (task[0].name, task[1]))
    found = list(measure(instances()[:2], ["sm_80", "sm_90a"], 8))
    assert found == [(name, arch) for arch in ("sm_80", "sm_90a") for name in ("add<float,1>", "add<float,2>")]
    assert made == [(4, "spawn", (toys.parent / "cache",))]
