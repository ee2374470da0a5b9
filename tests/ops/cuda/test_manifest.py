from __future__ import annotations

import pytest

from pagecore.errors import DeviceError
from pagecore.ops.cuda.compilation import sources
from pagecore.ops.cuda.compilation.manifest import Instance, instance, instances, parse_manifest
from pagecore.ops.cuda.compilation.sources import read_source, source_folder, with_headers


def test_an_entry_is_built_for_the_cross_product_of_its_values():
    found = parse_manifest("""
        [[kernel]]
        entry = "write"
        source = "write.cu"
        values = [["float", "unsigned int"], [64, 128]]
        [[kernel]]
        entry = "plain"
        source = "other.cu"
        [[kernel]]
        entry = "write"
        source = "write.cu"
        values = [["pc_half"], [256]]
    """)
    assert [each.name for each in found] == [
        "write<float,64>",
        "write<float,128>",
        "write<unsignedint,64>",
        "write<unsignedint,128>",
        "plain",
        "write<pc_half,256>",
    ]
    assert found[1] == Instance("write<float,128>", "write", "write.cu", ("float", "128"))
    assert (found[1].expression, found[4].expression) == ("pagecore::write<float,128>", "pagecore::plain")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[kernel]]\nentry = "a"', "has the keys"),
        ('[[kernel]]\nentry = "a"\nsource = "b.cu"\nvalue = [[1]]', "has the keys"),
        ('[[kernel]]\nentry = "a"\nsource = "b.cu"\nvalues = [[1], []]', "empty list of values for a"),
        ('[[kernel]]\nentry = "a"\nsource = "b.cu"\nvalues = [[1, 1]]', "has a<1> twice"),
        ("[[kernel", "Expected"),
    ],
)
def test_an_invalid_manifest_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_manifest(text)


def test_every_source_of_the_manifest_exists():
    for source in {each.source for each in instances()}:
        assert (source_folder() / source).is_file(), source
    assert len({each.name for each in instances()}) == len(instances())


def test_an_instance_is_found_by_its_name(toys):
    assert instance("add<pc_half,2>").source == "toy.cu"
    with pytest.raises(KeyError, match="no kernel is called add<pc_half, 2>"):
        instance("add<pc_half, 2>")


def test_a_source_is_read_with_all_headers_that_it_includes(toys):
    text, headers = with_headers("toy.cu")
    assert text == read_source("toy.cu")
    assert set(headers) == {"cuda_src/toy.cuh", "cuda_src/device/primitives.cuh", "cuda_src/abi/types.h"}


def test_a_package_without_sources_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "pagecore" / "ops" / "cuda" / "compilation" / "sources.py"))
    with pytest.raises(DeviceError, match=r"CUDA sources are neither in .* nor next to it: install pagecore again"):
        source_folder.__wrapped__()
