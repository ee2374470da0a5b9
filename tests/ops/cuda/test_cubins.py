"""The disk cache of compiled kernels: keys, atomic writes, unsafe files, and folders that cannot be written."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import stat
import threading
from pathlib import Path

import pytest

from pagecore.ops.cuda.compilation import cubins
from pagecore.ops.cuda.compilation.compiler import Cubin
from pagecore.ops.cuda.compilation.cubins import (
    cache_folder,
    cache_key,
    cubin,
    read_cubin,
    set_cache_folder,
    write_cubin,
)
from pagecore.ops.cuda.compilation.manifest import Instance, instance

ONE = Cubin(b"\x7fELF\n\0image\n\n", {"add<float,1>": "_Z3add"}, "Used 3 registers\n")


@pytest.fixture
def compiled(toys, monkeypatch):
    """Record the calls of a stub compiler, whose version a test may change."""
    done = []

    def compile_instances(instances, architecture):
        done.append((tuple(each.name for each in instances), architecture))
        return Cubin(f"image {len(done)}".encode(), {each.name: "symbol" for each in instances}, "log")

    monkeypatch.setattr(cubins, "compile_instances", compile_instances)
    monkeypatch.setattr(cubins, "compiler_version", lambda: "13.5")
    return done


def test_a_kernel_is_compiled_once_and_then_read_from_the_cache(compiled):
    one = instance("add<float,1>")
    assert cubin([one], "sm_80") == cubin([one], "sm_80") == Cubin(b"image 1", {"add<float,1>": "symbol"}, "log")
    assert compiled == [(("add<float,1>",), "sm_80")]


def change_source(folder, monkeypatch):
    (folder / "toy.cu").write_text((folder / "toy.cu").read_text() + "// more\n")


def change_header(folder, monkeypatch):
    (folder / "abi/types.h").write_text((folder / "abi/types.h").read_text() + "// more\n")


def change_compiler(folder, monkeypatch):
    monkeypatch.setattr(cubins, "compiler_version", lambda: "13.6")


def change_flags(folder, monkeypatch):
    monkeypatch.setattr(cubins, "flags", lambda: ("--std=c++20",))


@pytest.mark.parametrize("change", [change_source, change_header, change_compiler, change_flags])
def test_the_key_depends_on_every_input_of_the_compiler(compiled, toys, monkeypatch, change):
    one = instance("add<float,1>")
    before = cache_key([one], "sm_80")
    change(toys, monkeypatch)
    assert cache_key([one], "sm_80") != before


def test_instances_and_architectures_have_keys_of_their_own(compiled):
    one, two = instance("add<float,1>"), instance("add<float,2>")
    keys = [cache_key(*each) for each in (([one], "sm_80"), ([two], "sm_80"), ([one, two], "sm_80"), ([one], "sm_90a"))]
    assert len(set(keys)) == 4


def test_the_key_does_not_depend_on_other_sources(compiled, toys):
    one = instance("add<float,1>")
    before = cache_key([one], "sm_80")
    (toys / "decode_toy.cu").write_text("// another\n")
    assert cache_key([one], "sm_80") == before


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "deep" / "er" / "one.cubin"
    assert write_cubin(path, ONE)
    assert read_cubin(path) == ONE
    assert [each.name for each in path.parent.iterdir()] == ["one.cubin"]


@pytest.fixture
def whole(tmp_path):
    write_cubin(tmp_path / "one.cubin", ONE)
    return (tmp_path / "one.cubin").read_bytes()


def test_a_truncated_file_is_rejected(tmp_path, whole):
    path = tmp_path / "one.cubin"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_cubin(path) is None, length
    path.write_bytes(whole + b"\0")
    assert read_cubin(path) is None


def test_a_file_with_a_changed_byte_is_rejected(tmp_path, whole):
    path = tmp_path / "one.cubin"
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        assert read_cubin(path) is None, i


def test_a_truncated_file_is_compiled_again_and_replaced(compiled, toys):
    one = instance("add<float,1>")
    cubin([one], "sm_80")
    (path,) = (toys.parent / "cache").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert cubin([one], "sm_80").image == b"image 2"
    assert cubin([one], "sm_80").image == b"image 2"
    assert len(compiled) == 2


# ---- files and folders that are not safe to load from


def cached(compiled, toys):
    """Compile the kernel "add<float,1>", and return the path of its file."""
    cubin([instance("add<float,1>")], "sm_80")
    (path,) = (toys.parent / "cache").iterdir()
    return path


def with_head(head):
    """Return a file with an arbitrary head and a valid checksum."""
    payload = head + b"\nimage"
    return cubins._MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


WRONG_HEADS = {
    "a field more": b'{"symbols": {"add<float,1>": "a"}, "log": "", "more": 1}',
    "a field less": b'{"log": ""}',
    "an array": b"[1]",
    "a number": b"1",
    "null": b"null",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "nesting": b"[" * 200_000,
    "symbols in an array": b'{"symbols": ["add<float,1>"], "log": ""}',
    "a symbol that is a number": b'{"symbols": {"add<float,1>": 1}, "log": ""}',
    "a log that is a number": b'{"symbols": {"add<float,1>": "a"}, "log": 1}',
    "another kernel": b'{"symbols": {"add<float,2>": "a"}, "log": ""}',
}


@pytest.mark.parametrize("head", WRONG_HEADS.values(), ids=WRONG_HEADS)
def test_a_file_with_a_wrong_head_is_compiled_again_and_replaced(compiled, toys, head):
    path = cached(compiled, toys)
    path.write_bytes(with_head(head))
    assert [cubin([instance("add<float,1>")], "sm_80").image for _ in range(2)] == [b"image 2"] * 2


def make_writable_by_the_group(path):
    path.chmod(0o620)


def make_writable_by_others(path):
    path.chmod(0o602)


def make_symbolic_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def make_fifo(path):
    path.unlink()
    os.mkfifo(path, 0o600)


ODD = [make_writable_by_the_group, make_writable_by_others, make_symbolic_link, make_fifo]


@pytest.mark.parametrize("make_odd", ODD)
def test_an_unsafe_file_is_compiled_again_and_replaced_by_a_private_one(compiled, toys, make_odd):
    path = cached(compiled, toys)
    make_odd(path)
    assert [cubin([instance("add<float,1>")], "sm_80").image for _ in range(2)] == [b"image 2"] * 2
    status = path.lstat()
    assert stat.S_ISREG(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600


def test_a_file_above_the_limit_is_not_read(compiled, toys, monkeypatch):
    path = cached(compiled, toys)
    monkeypatch.setattr(cubins, "_FILE_BYTES_MAX", path.stat().st_size)
    assert read_cubin(path) is not None
    monkeypatch.setattr(cubins, "_FILE_BYTES_MAX", path.stat().st_size - 1)
    assert read_cubin(path) is None


def owned_by(monkeypatch, user, matches):
    """Make `os.fstat` report another owner for matching files and folders."""
    plain = os.fstat

    def fstat(descriptor):
        status = plain(descriptor)
        if not matches(status):
            return status
        fields = list(status)
        fields[stat.ST_UID] = user
        return os.stat_result(fields)

    monkeypatch.setattr(cubins.os, "fstat", fstat)


def test_a_file_of_another_user_is_not_loaded(compiled, toys, monkeypatch):
    path = cached(compiled, toys)
    assert read_cubin(path) is not None
    owned_by(monkeypatch, os.geteuid() + 1, lambda status: stat.S_ISREG(status.st_mode))
    assert read_cubin(path) is None
    assert cubin([instance("add<float,1>")], "sm_80").image == b"image 2"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which can give files away")
@pytest.mark.parametrize("given", ["file", "folder"])
def test_root_does_not_load_files_of_another_user(compiled, toys, given):
    path = cached(compiled, toys)
    os.chown(path if given == "file" else path.parent, 65534, 65534)
    if given == "file":
        assert read_cubin(path) is None
    else:
        with pytest.warns(RuntimeWarning, match="got owner 65534"):
            assert read_cubin(path) is None
    assert cubin([instance("add<float,1>")], "sm_80").image == b"image 2"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o707])
def test_a_folder_that_others_can_write_is_not_used_and_one_warning_is_given(compiled, toys, mode):
    path = cached(compiled, toys)
    before = path.read_bytes()
    path.parent.chmod(mode)
    one = instance("add<float,1>")
    with pytest.warns(RuntimeWarning, match=rf"{path.parent} is not used: .* mode {mode:o}; use chmod go-w") as warned:
        assert [cubin([one], "sm_80").image for _ in range(3)] == [b"image 2", b"image 3", b"image 4"]
    assert len(warned) == 1
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    path.parent.chmod(0o700)
    assert cubin([one], "sm_80").image == b"image 1"


def test_a_folder_of_another_user_is_not_used(compiled, toys, monkeypatch):
    path = cached(compiled, toys)
    owned_by(monkeypatch, os.geteuid() + 1, lambda status: stat.S_ISDIR(status.st_mode))
    with pytest.warns(RuntimeWarning, match=f"got owner {os.geteuid() + 1} and mode 700"):
        assert cubin([instance("add<float,1>")], "sm_80").image == b"image 2"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_folder_and_its_files_are_private_under_any_umask(compiled, toys):
    before = os.umask(0)
    try:
        path = cached(compiled, toys)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cubins.os, "fsync", full)
    assert not write_cubin(tmp_path / "one.cubin", ONE)
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_is_compiled_each_time_if_the_folder_cannot_be_written(compiled, tmp_path):
    (tmp_path / "file").touch()
    set_cache_folder(tmp_path / "file" / "cache")
    one = instance("add<float,1>")
    assert [cubin([one], "sm_80").image for _ in range(2)] == [b"image 1", b"image 2"]


def test_a_file_that_cannot_be_replaced_leaves_no_partial_file(compiled, toys):
    one = instance("add<float,1>")
    path = toys.parent / "cache" / f"{cache_key([one], 'sm_80')}.cubin"
    path.mkdir(parents=True)
    assert cubin([one], "sm_80").image == b"image 1"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_the_folder_comes_from_the_parameter_the_environment_or_the_user_in_this_order(monkeypatch, tmp_path):
    for name in ("PAGECORE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "pagecore"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "pagecore"
    monkeypatch.setenv("PAGECORE_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    set_cache_folder(str(tmp_path / "said"))
    assert cache_folder() == tmp_path / "said"
    set_cache_folder(None)
    assert cache_folder() == tmp_path / "own"


def test_a_user_without_a_home_has_no_cache_and_works(compiled, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    set_cache_folder(None)
    monkeypatch.delenv("PAGECORE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() is None
    assert cubin([instance("add<float,1>")], "sm_80").image == b"image 1"


def write_often(path, number):
    for i in range(150):
        if not write_cubin(path, Cubin(bytes([number]) * (1000 + 50 * i), {"one": str(number)}, "")):
            raise SystemExit(1)


@pytest.mark.slow
def test_readers_see_one_whole_file_while_several_processes_write_it(tmp_path):
    path = tmp_path / "one.cubin"
    write_cubin(path, Cubin(b"\1" * 1000, {"one": "1"}, ""))
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_often, args=(path, number)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers):
        found = read_cubin(path)
        assert found is not None
        assert set(found.image) == {int(found.symbols["one"])}
        reads += 1
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert reads > 0
    assert [each.name for each in tmp_path.iterdir()] == ["one.cubin"]


def compile_toy(folder, cache, queue):
    from pagecore.ops.cuda.compilation import sources

    sources.source_folder = lambda: folder
    set_cache_folder(cache)
    queue.put(cubin([Instance("add<float,1>", "add", "toy.cu", ("float", "1"))], "sm_80"))


@pytest.mark.slow
def test_several_processes_may_compile_one_kernel_at_once(nvrtc, toys):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (toys, toys.parent / "cache", queue)
    processes = [context.Process(target=compile_toy, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert found[0].symbols == found[1].symbols
    assert all(each.image.startswith(b"\x7fELF") for each in found)
    (path,) = (toys.parent / "cache").iterdir()
    assert read_cubin(path) in found


def test_threads_may_write_one_file_at_once(tmp_path):
    path = tmp_path / "one.cubin"
    threads = [threading.Thread(target=write_cubin, args=(path, ONE)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_cubin(path) == ONE
    assert len(list(tmp_path.iterdir())) == 1
